"""Moves equal Transposes of all outputs of a Split before the Split.

    Split(x, axis)[i] -> Transpose(p) for every i   =>  Transpose(x, p) -> Split(the axis after p)

A fused query, key and value projection that is split by channels ([B,3C,HW], convolutional attention) thus becomes one
on tokens. Rejected: outputs with other consumers, different permutations.
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes import value_queries as values
from fusion_passes.graph_pass import Pass, PassOutcome, case_makers, rewrite_nodes
from fusion_passes.shapes.infer import annotate


def move_transposes_before_splits(model: ir.Model) -> PassOutcome:
    """Move Transposes of all outputs before the Split, in place."""
    outcome = rewrite_nodes(model, "splits", "Split", _reject_reason, _rewrite)
    if outcome.counts:
        annotate(model.graph)
    return outcome


def _reject_reason(node: ir.Node) -> str | None:
    perms = []
    for output in node.outputs:
        consumers = values.consumers(output)
        if not consumers or output.is_graph_output() or any(node.op_type != "Transpose" for node in consumers):
            return "an output has a consumer other than Transpose"
        perms += [values.perm(consumer.outputs[0]) for consumer in consumers]
    return None if perms[0] and perms.count(perms[0]) == len(perms) else "the outputs have different Transposes"


def _rewrite(graph: ir.Graph, node: ir.Node) -> None:
    old = [consumer for output in node.outputs for consumer in values.consumers(output)]
    perm, x = values.perm(old[0].outputs[0]), values.operand(node, 0)
    assert perm is not None
    transpose = ir.node("Transpose", [x], {"perm": perm})
    transpose.metadata_props.update(node.metadata_props)
    value = transpose.outputs[0]
    value.name, value.type = f"{node.outputs[0].name}.whole", x.type
    if x.shape is not None:
        value.shape = ir.Shape([x.shape[axis] for axis in perm])
    graph.insert_before(node, transpose)
    node.replace_input_with(0, value)
    axis = node.attributes.get_int("axis", 0) % len(perm)
    node.attributes["axis"] = ir.AttrInt64("axis", perm.index(axis))
    for output in node.outputs:
        first = values.consumers(output)[0].outputs[0]
        output.shape = first.shape
    for consumer in old:
        source = values.operand(consumer, 0)
        ir.convenience.replace_all_uses_with(consumer.outputs[0], source, replace_graph_outputs=True)
        graph.remove(consumer, safe=True)


def _graph(body: str, outputs: str = "float[B,S,4] a, float[B,S,4] b") -> str:
    return f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[B,8,S] x) => ({outputs}) <int64[2] halves = {{4, 4}}> {{
            l, r = Split <axis = 1> (x, halves)
            {body}
        }}"""


_SIZES = {"B": 2, "S": 5}
_BOTH = "lt = Transpose <perm = [0, 2, 1]> (l)  rt = Transpose <perm = [0, 2, 1]> (r)  a = Relu (lt)  b = Relu (rt)"
_case, _rejected = case_makers(_SIZES)
CASES = [
    _case("both halves", _graph(_BOTH), ops={"Transpose": 1, "Split": 1}),
    _rejected(
        "a half read as it is",
        _graph("lt = Transpose <perm = [0, 2, 1]> (l)  a = Relu (lt)  b = Relu (r)", "float[B,S,4] a, float[B,4,S] b"),
        rejection="other than Transpose",
    ),
    _rejected(
        "two permutations",
        _graph(_BOTH.replace("[0, 2, 1]> (r)", "[2, 0, 1]> (r)"), "float[B,S,4] a, float[S,B,4] b"),
        rejection="different Transposes",
    ),
    _rejected("a half that is an output", _graph(_BOTH, "float[B,S,4] a, float[B,S,4] b, float[B,4,S] l")),
]
PASS = Pass("splits", move_transposes_before_splits, CASES)
