"""Query, key and value of one product, split as tokens instead of behind a view of five axes.

    x [B,S,3*N*D] -> Reshape [B,S,3,N,D] -> Transpose 20314 -> Split(axis 0) -> Squeeze: three times [B,N,S,D]
        =>  Split(x, axis 2) -> Reshape [B,S,N,D] -> Transpose 0213
    x [B,S,3*N*D] -> Reshape [B,S,3,N,D] -> Split(axis 2) -> Squeeze: three times [B,S,N,D]
        =>  Split(x, axis 2) -> Reshape [B,S,N,D]

Stock vision transformers write the first. Any number of equal parts is split, so keys and values of one product too.
Rejected: views that keep other axes, parts of different sizes, parts whose first axis is not dropped.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import onnx_ir as ir

from fusion_passes import value_queries as values
from fusion_passes.graph_edits import new_initializer, replace_value, unique_name
from fusion_passes.graph_pass import Pass, PassCase, PassOutcome, rewrite_nodes
from fusion_passes.shapes.infer import annotate_new

PARTS_FIRST, HEADS_FIRST = [2, 0, 3, 1, 4], [0, 2, 1, 3]


def _view(node: ir.Node) -> ir.Node | None:
    """Return the Reshape to [B,S,P,N,D] whose axis P the Split `node` splits, or None."""
    axis, x = node.attributes.get_int("axis", 0), node.inputs[0]
    if x is not None and axis == 0 and values.perm(x) == PARTS_FIRST:
        transpose = x.producer()
        x = transpose.inputs[0] if transpose is not None and len(values.consumers(x)) == 1 else None
        axis = 2
    if x is None or axis != 2 or values.rank(x) != 5 or len(values.consumers(x)) != 1 or x.is_graph_output():
        return None
    view = x.producer()
    return view if view is not None and view.op_type == "Reshape" and not view.domain else None


def _reject_reason(node: ir.Node) -> str | None:
    view = _view(node)
    if view is None or node.domain:
        return "it does not split a view [B,S,P,N,D]"
    tokens, heads = values.dims(view.inputs[0]), values.dims(view.outputs[0]) or []
    if tokens is None or len(tokens) != 3 or tokens[:2] != heads[:2] or not all(isinstance(n, int) for n in heads[2:]):
        return "the view does not split the last axis of [B,S,C] alone"
    if heads[2] != len(node.outputs):
        return "the parts are not of size 1"
    dropped = 0 if node.attributes.get_int("axis", 0) == 0 else 2
    for output in node.outputs:
        dims, consumers = values.dims(output) or [], values.consumers(output)
        output_dims = dims[:dropped] + dims[dropped + 1 :]
        squeezes = [
            c for c in consumers if c.op_type in ("Squeeze", "Reshape") and values.dims(c.outputs[0]) == output_dims
        ]
        if output.is_graph_output() or not consumers or len(squeezes) != len(consumers):
            return "a part keeps its axis"
    return None


def _rewrite(graph: ir.Graph, node: ir.Node) -> None:
    view = _view(node)
    assert view is not None
    x, (_, _, parts, heads, size) = values.operand(view, 0), values.dims(view.outputs[0]) or []
    assert isinstance(heads, int)
    assert isinstance(size, int)
    assert isinstance(parts, int)
    first = node.outputs[0]
    sizes = new_initializer(graph, unique_name(first, "sizes"), np.full(parts, heads * size))
    target = new_initializer(graph, unique_name(first, "heads"), [0, 0, heads, size])
    split = ir.node("Split", [x, sizes], {"axis": 2}, num_outputs=parts)
    split.metadata_props.update(node.metadata_props)
    graph.insert_before(node, split)
    swaps = node.attributes.get_int("axis", 0) == 0
    tokens = [*(values.dims(x) or [])[:2], heads * size]
    for part, old in zip(split.outputs, node.outputs, strict=True):
        part.name, part.type, part.shape = f"{old.name}.tokens", old.type, ir.Shape(tokens)
        for squeeze in values.consumers(old):
            new = ir.node("Reshape", [part, target])
            if swaps:
                graph.insert_before(squeeze, new)
                flat = new.outputs[0]
                flat.name, flat.type = f"{squeeze.outputs[0].name}.heads", old.type
                flat.shape = ir.Shape([*tokens[:2], heads, size])
                new = ir.node("Transpose", [flat], {"perm": HEADS_FIRST})
            replace_value(graph, squeeze, new, squeeze.outputs[0])
            graph.remove(squeeze, safe=True)


def packed_heads(model: ir.Model) -> PassOutcome:
    """Rewrite the Splits of `model` in place."""
    outcome = rewrite_nodes(model, "packed_heads", "Split", _reject_reason, _rewrite)
    if outcome.counts:
        annotate_new(model.graph)
    return outcome


def _graph(body: str, split: str = "axis = 0, num_outputs = 3", outputs: str = "", heads: str = "0, 0, 3, 2, 4") -> str:
    return f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[B,S,24] x) => (float[B,2,S,4] y {outputs}) <int64[1] zero = {{0}}, int64[1] two = {{2}}> {{
            heads = Constant <value_ints = [{heads}]> ()  h = Reshape (x, heads)
            {body.replace("SPLIT", f"Split <{split}>")}
        }}"""


_FIRST = "t = Transpose <perm = [2, 0, 3, 1, 4]> (h)  a, b, c = SPLIT (t)"
_SQUEEZED = "q = Squeeze (a, zero)  k = Squeeze (b, zero)  v = Squeeze (c, zero)  s = Add (q, k)  y = Mul (s, v)"
_SECOND = """a, b, c = SPLIT (h)  q = Squeeze (a, two)  k = Squeeze (b, two)  v = Squeeze (c, two)
    s = Add (q, k)  z = Mul (s, v)  y = Transpose <perm = [0, 2, 1, 3]> (z)"""
_case = partial(PassCase, sizes={"B": 2, "S": 5}, ops={"Split": 1, "Squeeze": 0, "Reshape": 3})
_rejected = partial(PassCase, sizes={"B": 2, "S": 5}, rewrites=0)
CASES = [
    _case(
        "heads first", _graph(f"{_FIRST}  {_SQUEEZED}"), ops={"Split": 1, "Squeeze": 0, "Reshape": 3, "Transpose": 3}
    ),
    _case("tokens first", _graph(_SECOND, "axis = 2, num_outputs = 3")),
    _rejected(
        "another permutation",
        _graph(f"{_FIRST}  {_SQUEEZED}".replace("2, 0, 3, 1, 4", "2, 3, 0, 1, 4"), outputs="").replace(
            "(float[B,2,S,4] y", "(float[2,B,S,4] y"
        ),
        rejection="does not split a view",
    ),
    _rejected(
        "a part that keeps its axis",
        _graph(f"{_FIRST}  {_SQUEEZED}  r = Neg (c)", outputs=", float[1,B,2,S,4] r"),
        rejection="keeps its axis",
    ),
    _rejected(
        "the view is read again",
        _graph(f"{_FIRST}  {_SQUEEZED}  r = Neg (h)", outputs=", float[B,S,3,2,4] r"),
        rejection="does not split a view",
    ),
    _rejected(
        "two parts of three",
        _graph(
            "t = Transpose <perm = [2, 0, 3, 1, 4]> (h)  sizes = Constant <value_ints = [1, 2]> ()"
            "  a, b = Split <axis = 0> (t, sizes)  y = Squeeze (a, zero)  r = Neg (b)",
            outputs=", float[2,B,2,S,4] r",
        ),
        rejection="not of size 1",
    ),
]

PASS = Pass("packed_heads", packed_heads, CASES)
