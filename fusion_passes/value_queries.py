"""Queries of rewrite rules about values: constants, shapes, permutations, consumers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

# Values whose constant or shape was unknown in the last queries; the last one is where a proof failed. A rule clears
# the list before its queries. It is a global, so rewriting is not thread-safe; the rewriter's own state is global too.
unknown_values: list[ir.Value] = []


def constant(value: ir.Value | None) -> np.ndarray | None:
    """Return the constant array of a value, or None. This reads the tensor: query the size of a weight first."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return _report_unknown(value) if tensor is None else tensor.numpy()


def is_constant(value: ir.Value | None) -> bool:
    """Return whether a value is an initializer or the output of a Constant node."""
    if value is not None and ir.convenience.get_const_tensor(value) is not None:
        return True
    _report_unknown(value)
    return False


def _report_unknown(value: ir.Value | None) -> Any:
    if value is not None:
        unknown_values.append(value)
    return None


def scalar(value: ir.Value | None) -> float | None:
    """Return the element of a constant with one element, of any rank, or None."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.size != 1:
        return _report_unknown(value)
    return float(tensor.numpy().astype(np.float64).ravel()[0])


def dims(value: ir.Value | None) -> list[int | str] | None:
    """Return the shape as ints and symbol names, or None if the rank is unknown. Equal names mean equal sizes."""
    if value is None or value.shape is None:
        return _report_unknown(value)
    return [d if isinstance(d, int) else (d.value or f"?{value.name}:{i}") for i, d in enumerate(value.shape)]


def rank(value: ir.Value | None) -> int | None:
    """Return the number of axes, or None if it is unknown."""
    return _report_unknown(value) if value is None or value.shape is None else value.shape.rank()


def size(value: ir.Value | None, axis: int) -> int | None:
    """Return the size of an axis, or None if it is symbolic or unknown."""
    shape = dims(value)
    if shape is None or not -len(shape) <= axis < len(shape):
        return None
    dim = shape[axis]
    return dim if isinstance(dim, int) else _report_unknown(value)


def static_size(value: ir.Value | None, axis: int) -> int:
    """Return the size of an axis, which must be known."""
    known_size = size(value, axis)
    assert known_size is not None
    return known_size


def same_shape(a: ir.Value | None, b: ir.Value | None) -> bool:
    """Return whether two shapes are known and equal, symbol by symbol."""
    if dims(a) is not None and dims(a) == dims(b):
        return True
    _report_unknown(b)
    return False


def is_vector(value: ir.Value | None, length: int | None) -> bool:
    """Return whether a value is a constant of rank 1 and of `length`; False if `length` is None (an unknown size)."""
    return is_constant(value) and rank(value) == 1 and length is not None and size(value, 0) == length


def perm(value: ir.Value | None) -> list[int] | None:
    """Return the permutation of the Transpose that computes `value`, or None if no Transpose does.

    TorchScript writes negative axes, which ONNX does not allow; they are returned as non-negative axes.
    """
    node = None if value is None else value.producer()
    if node is None or node.op_type != "Transpose":
        return None
    attribute = node.attributes.get_ints("perm")
    if attribute is not None:
        order = [axis % len(attribute) for axis in attribute]
        return order if sorted(order) == list(range(len(order))) else None
    axes = rank(node.inputs[0])
    return None if axes is None else list(range(axes))[::-1]


def ints(value: ir.Value | None) -> list[int] | None:
    """Return the elements of a constant integer tensor, or None."""
    array = constant(value)
    return None if array is None or array.dtype.kind != "i" else [int(n) for n in array.ravel()]


def last_axis(axis: int, value: ir.Value | None) -> bool:
    """Return whether `axis` is the last axis of `value`."""
    axes = rank(value)
    return axis == -1 or (axes is not None and axis == axes - 1)


def producer(value: ir.Value | None) -> ir.Node:
    """Return the node that computes a value; neither an input nor an initializer is one."""
    node = None if value is None else value.producer()
    assert node is not None
    return node


def operand(node: ir.Node, index: int) -> ir.Value:
    """Return an input of a node, which must be there."""
    value = node.inputs[index]
    assert value is not None
    return value


def consumers(value: ir.Value) -> Sequence[ir.Node]:
    """Return the nodes that consume a value, without duplicates."""
    return tuple(dict.fromkeys(node for node, _ in value.uses()))


def has_one_use(value: ir.Value) -> bool:
    """Return whether one input of one node reads a value, and the graph does not return it."""
    return len(value.uses()) == 1 and not value.is_graph_output()


def data_consumers(value: ir.Value) -> Sequence[ir.Node]:
    """Return the consumers of a value's elements, without duplicates: all but Shape, which reads only the sizes."""
    return tuple(node for node in consumers(value) if node.op_type != "Shape")


def required_channels(value: ir.Value) -> int | None:
    """Return the size of axis 1 that a consuming Conv requires, directly or behind a Cast, or None."""
    for node in consumers(value):
        if node.op_type == "Cast":
            channels = required_channels(node.outputs[0])
        elif node.op_type == "Conv" and node.inputs[0] is value and size(node.inputs[1], 1) is not None:
            channels = (size(node.inputs[1], 1) or 0) * node.attributes.get_int("group", 1)
        else:
            continue
        if channels is not None:
            return channels
    return None
