"""Operator chains that cancel: conversions of shape, axis order or dtype and back, and neutral Mul, Div, Add, Sub.

Reshape(Reshape(x)), Squeeze(Unsqueeze(x)) to the shape of x   =>  x
Transpose(Transpose(x)) back to the order of x                 =>  x
Cast(Cast(x, wider), type of x)                                =>  x
x * 1, x / 1, x + 0, x - 0, also with tensors of 1 or 0        =>  x
Slice(x, step 1) to the shape of x                             =>  x
Slice(Concat(x, y)) that cuts out x                            =>  x
Concat(Slice(x, 0:n), Slice(x, n:end)), Concat(Split(x))       =>  x
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from fusion_passes import value_queries as values
from fusion_passes.canonicalize.slices import END, sliced_interval
from fusion_passes.canonicalize.uniform_values import uniform_value

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
        return data if forward and values.same_shape(data, y) and _has_named_sizes(y) else _cut_part(node)
    if node.op_type == "Concat":
        return _cut_value(node)
    neutral, operands = NEUTRAL.get(node.op_type), node.inputs
    if neutral is None or len(operands) != 2:
        return None
    sides = ((0, 1),) if node.op_type in ("Div", "Sub") else ((0, 1), (1, 0))
    return next(
        (operands[a] for a, b in sides if values.same_shape(operands[a], y) and uniform_value(operands[b]) == neutral),
        None,
    )


def _cut_part(cut: ir.Node) -> ir.Value | None:
    """Return the value that a Concat joined with others and the Slice `cut` cuts out again, or None."""
    source = cut.inputs[0]
    concat = None if source is None else source.producer()
    extent = None if source is None else sliced_interval(cut, source)
    if concat is None or concat.op_type != "Concat" or extent is None:
        return None
    axis, start, end = extent
    if concat.attributes["axis"].as_int() % len(values.dims(source) or [0]) != axis:
        return None
    offset = 0
    for part in concat.inputs:
        width = values.size(part, axis)
        if width is None or offset > start:
            return None
        if (offset, offset + width) == (start, end):
            return part
        offset += width
    return None


def _cut_value(concat: ir.Node) -> ir.Value | None:
    """Return the value that a Split, or two Slices at any place, cut and `concat` joins again, or None."""
    first = None if concat.inputs[0] is None else concat.inputs[0].producer()
    if first is not None and first.op_type == "Split" and first.outputs == concat.inputs:
        axes = [node.attributes.get_int("axis", 0) for node in (first, concat)]
        return first.inputs[0] if axes[0] == axes[1] or values.rank(first.inputs[0]) == abs(axes[0] - axes[1]) else None
    cuts = [cut for value in concat.inputs if value is not None and (cut := value.producer()) and len(cut.inputs) > 3]
    if len(concat.inputs) != 2 or [cut.op_type for cut in cuts] != ["Slice", "Slice"]:
        return None
    x, rank = cuts[0].inputs[0], values.rank(cuts[0].inputs[0])
    axis, end = concat.attributes["axis"].as_int(), values.ints(cuts[1].inputs[2])
    if x is not cuts[1].inputs[0] or rank is None or values.ints(cuts[0].inputs[1]) != [0] or not end or end[0] < END:
        return None
    along = all([n % rank for n in values.ints(cut.inputs[3]) or ()] == [axis % rank] for cut in cuts)
    forward = all(len(cut.inputs) < 5 or values.ints(cut.inputs[4]) == [1] for cut in cuts)
    return x if along and forward and cuts[0].inputs[2] is cuts[1].inputs[1] else None


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
