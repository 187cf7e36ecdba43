"""Operator chains that cancel: conversions of shape, axis order or dtype and back, and neutral Mul, Div, Add, Sub.

Reshape(Reshape(x)), Squeeze(Unsqueeze(x)) to the shape of x   =>  x
Transpose(Transpose(x)) back to the order of x                 =>  x
Cast(Cast(x, wider), type of x)                                =>  x
x * 1, x / 1, x + 0, x - 0                                     =>  x
Slice(x, step 1) to the shape of x                             =>  x
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from fusion_passes import value_queries as values

VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten"})
MAX_LENGTH = 8  # nodes of a chain
WIDER = {
    ir.DataType.FLOAT16: {ir.DataType.FLOAT, ir.DataType.DOUBLE},
    ir.DataType.BFLOAT16: {ir.DataType.FLOAT, ir.DataType.DOUBLE},
    ir.DataType.FLOAT: {ir.DataType.DOUBLE},
}
NEUTRAL = {"Mul": 1.0, "Div": 1.0, "Add": 0.0, "Sub": 0.0}


def equivalent_input(node: ir.Node) -> ir.Value | None:
    """Return the earlier value that the output of a standard node always equals, or None."""
    y = node.outputs[0]
    if node.op_type in VIEWS:
        return next((x for x in _chain_inputs(node, VIEWS) if values.same_shape(x, y) and _has_named_sizes(y)), None)
    if node.op_type == "Transpose":
        order = values.perm(y)
        for x in _chain_inputs(node, {"Transpose"}):
            if order is not None and order == sorted(order):
                return x
            inner = values.perm(x)
            order = None if order is None or inner is None else [inner[axis] for axis in order]
    if node.op_type == "Cast":
        between = list(_chain_inputs(node, {"Cast"}))
        for i, x in enumerate(between):
            wider = WIDER.get(x.dtype) if x.dtype is not None else None
            if x.dtype == y.dtype and wider and all(v.dtype in wider for v in between[:i]):
                return x
    if node.op_type == "Slice":
        data, steps = node.inputs[0], node.inputs[4] if len(node.inputs) > 4 else None
        forward = steps is None or set(values.ints(steps) or ()) == {1}
        return data if forward and values.same_shape(data, y) and _has_named_sizes(y) else None
    neutral, operands = NEUTRAL.get(node.op_type), node.inputs
    if neutral is None or len(operands) != 2:
        return None
    sides = ((0, 1),) if node.op_type in ("Div", "Sub") else ((0, 1), (1, 0))
    return next(
        (operands[a] for a, b in sides if values.scalar(operands[b]) == neutral and values.same_shape(operands[a], y)),
        None,
    )


def _chain_inputs(node: ir.Node, op_types: frozenset[str] | set[str]) -> Iterator[ir.Value]:
    """Yield the first inputs of the chain of nodes of `op_types` that ends in `node`, last node first."""
    producer: ir.Node | None = node
    for _ in range(MAX_LENGTH):
        if producer is None or producer.op_type not in op_types or producer.domain or producer.inputs[0] is None:
            return
        yield producer.inputs[0]
        producer = producer.inputs[0].producer()


def _has_named_sizes(value: ir.Value) -> bool:
    """Return whether every axis has an integer size or a name."""
    return not any("?" in str(d) for d in values.dims(value) or ["?"])
