"""Round trips: values taken to another shape, order or type and back; factors and sums that change nothing.

Reshape(Reshape(x)), Squeeze(Unsqueeze(x)) to the shape of x   =>  x
Transpose(Transpose(x)) back to the order of x                 =>  x
Cast(Cast(x, wider), type of x)                                =>  x
x * 1, x / 1, x + 0, x - 0                                     =>  x
Slice(x, step 1) to the shape of x                             =>  x
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from fusion_passes import checks as c

VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten"})
LONGEST = 8  # nodes of a round trip
WIDER = {
    ir.DataType.FLOAT16: {ir.DataType.FLOAT, ir.DataType.DOUBLE},
    ir.DataType.BFLOAT16: {ir.DataType.FLOAT, ir.DataType.DOUBLE},
    ir.DataType.FLOAT: {ir.DataType.DOUBLE},
}
NEUTRAL = {"Mul": 1.0, "Div": 1.0, "Add": 0.0, "Sub": 0.0}


def origin(node: ir.Node) -> ir.Value | None:
    """The value that the result of a standard node always equals, or None."""
    y = node.outputs[0]
    if node.op_type in VIEWS:
        return next((x for x in _behind(node, VIEWS) if c.same_shape(x, y) and _is_sized(y)), None)
    if node.op_type == "Transpose":
        order = c.perm(y)
        for x in _behind(node, {"Transpose"}):
            if order is not None and order == sorted(order):
                return x
            inner = c.perm(x)
            order = None if order is None or inner is None else [inner[axis] for axis in order]
    if node.op_type == "Cast":
        between = list(_behind(node, {"Cast"}))
        for i, x in enumerate(between):
            wider = WIDER.get(x.dtype) if x.dtype is not None else None
            if x.dtype == y.dtype and wider and all(v.dtype in wider for v in between[:i]):
                return x
    if node.op_type == "Slice":
        whole, steps = node.inputs[0], node.inputs[4] if len(node.inputs) > 4 else None
        forward = steps is None or set(c.ints(steps) or ()) == {1}
        return whole if forward and c.same_shape(whole, y) and _is_sized(y) else None
    neutral, operands = NEUTRAL.get(node.op_type), node.inputs
    if neutral is None or len(operands) != 2:
        return None
    sides = ((0, 1),) if node.op_type in ("Div", "Sub") else ((0, 1), (1, 0))
    return next(
        (operands[a] for a, b in sides if c.scalar(operands[b]) == neutral and c.same_shape(operands[a], y)), None
    )


def _behind(node: ir.Node, op_types: frozenset[str] | set[str]) -> Iterator[ir.Value]:
    """What the node reads, and what those behind it of `op_types` read."""
    maker: ir.Node | None = node
    for _ in range(LONGEST):
        if maker is None or maker.op_type not in op_types or maker.domain or maker.inputs[0] is None:
            return
        yield maker.inputs[0]
        maker = maker.inputs[0].producer()


def _is_sized(value: ir.Value) -> bool:
    """Whether every axis has a size or a name of its own."""
    return not any("?" in str(d) for d in c.dims(value) or ["?"])
