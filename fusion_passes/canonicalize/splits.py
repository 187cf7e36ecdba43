"""Splits behind Transposes: the same Transpose of every part is one Transpose of the whole.

    Split(x, axis)[i] -> Transpose(p) for every i   =>  Transpose(x, p) -> Split(axis at its new place)

A fused query, key and value projection that is split by channels ([B,3C,HW], convolutional attention) thus becomes one
on tokens. Refused: parts read by anything else, permutations that differ.
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes import checks as c
from fusion_passes.pass_ import Case, Outcome, Pass, rewrite_nodes
from fusion_passes.shapes.infer import annotate


def splits(model: ir.Model) -> Outcome:
    """Move Transposes of all parts in front of the Split, in place."""
    outcome = rewrite_nodes(model, "splits", "Split", _refuse, _rewrite)
    if outcome.counts:
        annotate(model.graph)
    return outcome


def _refuse(node: ir.Node) -> str | None:
    perms = []
    for output in node.outputs:
        readers = c.users(output)
        if not readers or output.is_graph_output() or any(reader.op_type != "Transpose" for reader in readers):
            return "a part is read as it is"
        perms += [c.perm(reader.outputs[0]) for reader in readers]
    return None if perms[0] and perms.count(perms[0]) == len(perms) else "the parts are transposed in different ways"


def _rewrite(graph: ir.Graph, node: ir.Node) -> None:
    old = [reader for output in node.outputs for reader in c.users(output)]
    perm, x = c.perm(old[0].outputs[0]), node.inputs[0]
    assert perm is not None
    assert x is not None
    whole = ir.node("Transpose", [x], {"perm": perm})
    whole.metadata_props.update(node.metadata_props)
    value = whole.outputs[0]
    value.name, value.type = f"{node.outputs[0].name}.whole", x.type
    if x.shape is not None:
        value.shape = ir.Shape([x.shape[axis] for axis in perm])
    graph.insert_before(node, whole)
    node.replace_input_with(0, value)
    axis = node.attributes.get_int("axis", 0) % len(perm)
    node.attributes["axis"] = ir.AttrInt64("axis", perm.index(axis))
    for output in node.outputs:
        first = c.users(output)[0].outputs[0]
        output.shape = first.shape
    for reader in old:
        source = reader.inputs[0]
        assert source is not None
        ir.convenience.replace_all_uses_with(reader.outputs[0], source, replace_graph_outputs=True)
        graph.remove(reader, safe=True)


def _graph(body: str, outputs: str = "float[B,S,4] a, float[B,S,4] b") -> str:
    return f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[B,8,S] x) => ({outputs}) <int64[2] halves = {{4, 4}}> {{
            l, r = Split <axis = 1> (x, halves)
            {body}
        }}"""


_SIZES = {"B": 2, "S": 5}
_BOTH = "lt = Transpose <perm = [0, 2, 1]> (l)  rt = Transpose <perm = [0, 2, 1]> (r)  a = Relu (lt)  b = Relu (rt)"
CASES = [
    Case("both halves", _graph(_BOTH), ops={"Transpose": 1, "Split": 1}, sizes=_SIZES),
    Case(
        "a half read as it is",
        _graph("lt = Transpose <perm = [0, 2, 1]> (l)  a = Relu (lt)  b = Relu (r)", "float[B,S,4] a, float[B,4,S] b"),
        fires=0,
        refused="read as it is",
        sizes=_SIZES,
    ),
    Case(
        "two permutations",
        _graph(_BOTH.replace("[0, 2, 1]> (r)", "[2, 0, 1]> (r)"), "float[B,S,4] a, float[S,B,4] b"),
        fires=0,
        refused="different ways",
        sizes=_SIZES,
    ),
    Case(
        "a half that is an output",
        _graph(_BOTH, "float[B,S,4] a, float[B,S,4] b, float[B,4,S] l"),
        fires=0,
        sizes=_SIZES,
    ),
]
PASS = Pass("splits", splits, CASES)
