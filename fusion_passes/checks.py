"""Questions that rules ask of values: constants, shapes, permutations, who uses what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

# The values that the last questions got no answer for: where a proof that failed came to its end. A rule empties it
# before it asks; rewriting takes turns (the rewriter keeps its state in globals too).
unanswered: list[ir.Value] = []


def constant(value: ir.Value | None) -> np.ndarray | None:
    """The numbers a value always holds, or None. Reads the tensor: ask for its size first when it may be a weight."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return _no_answer(value) if tensor is None else tensor.numpy()


def is_constant(value: ir.Value | None) -> bool:
    """Whether a value is an initializer or the output of a Constant node."""
    if value is not None and ir.convenience.get_const_tensor(value) is not None:
        return True
    _no_answer(value)
    return False


def _no_answer(value: ir.Value | None) -> Any:
    if value is not None:
        unanswered.append(value)
    return None


def scalar(value: ir.Value | None) -> float | None:
    """The number held by a constant of one element, whatever its rank, or None."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.size != 1:
        return _no_answer(value)
    return float(tensor.numpy().astype(np.float64).ravel()[0])


def dims(value: ir.Value | None) -> list[int | str] | None:
    """The shape as ints and symbol names, equal names meaning equal sizes, or None when the rank is unknown."""
    if value is None or value.shape is None:
        return _no_answer(value)
    return [d if isinstance(d, int) else (d.value or f"?{value.name}:{i}") for i, d in enumerate(value.shape)]


def rank(value: ir.Value | None) -> int | None:
    """The number of axes, or None when unknown."""
    return _no_answer(value) if value is None or value.shape is None else value.shape.rank()


def size(value: ir.Value | None, axis: int) -> int | None:
    """The size of an axis when it is a known number."""
    shape = dims(value)
    if shape is None or not -len(shape) <= axis < len(shape):
        return None
    found = shape[axis]
    return found if isinstance(found, int) else _no_answer(value)


def same_shape(a: ir.Value | None, b: ir.Value | None) -> bool:
    """Whether two shapes are known and equal, symbol by symbol."""
    if dims(a) is not None and dims(a) == dims(b):
        return True
    _no_answer(b)
    return False


def is_vector(value: ir.Value | None, length: int | None) -> bool:
    """Whether a value is a constant of rank 1 and of `length`, which None (an unknown size) never is."""
    return is_constant(value) and rank(value) == 1 and length is not None and size(value, 0) == length


def perm(value: ir.Value | None) -> list[int] | None:
    """The permutation of the Transpose that yields `value`, or None when it is no Transpose.

    TorchScript writes axes counted from the end, which ONNX does not allow; they are counted from the front here.
    """
    node = None if value is None else value.producer()
    if node is None or node.op_type != "Transpose":
        return None
    given = node.attributes.get_ints("perm")
    if given is not None:
        axes_given = [axis % len(given) for axis in given]
        return axes_given if sorted(axes_given) == list(range(len(given))) else None
    axes = rank(node.inputs[0])
    return None if axes is None else list(range(axes))[::-1]


def ints(value: ir.Value | None) -> list[int] | None:
    """The elements of a constant integer tensor, or None."""
    numbers = constant(value)
    return None if numbers is None or numbers.dtype.kind != "i" else [int(n) for n in numbers.ravel()]


def last_axis(axis: int, value: ir.Value | None) -> bool:
    """Whether `axis` is the last one of `value`."""
    axes = rank(value)
    return axis == -1 or (axes is not None and axis == axes - 1)


def users(value: ir.Value) -> Sequence[ir.Node]:
    """The nodes that read a value, each once."""
    return tuple(dict.fromkeys(node for node, _ in value.uses()))


def readers(value: ir.Value) -> Sequence[ir.Node]:
    """The nodes that read the numbers of a value, each once: a Shape reads its sizes alone."""
    return tuple(node for node in users(value) if node.op_type != "Shape")


def demanded_channels(value: ir.Value) -> int | None:
    """The size that axis 1 of `value` must have for a convolution that reads it (behind a Cast, too) to run."""
    for node in users(value):
        if node.op_type == "Cast":
            channels = demanded_channels(node.outputs[0])
        elif node.op_type == "Conv" and node.inputs[0] is value and size(node.inputs[1], 1) is not None:
            channels = (size(node.inputs[1], 1) or 0) * node.attributes.get_int("group", 1)
        else:
            continue
        if channels is not None:
            return channels
    return None


def is_output(value: ir.Value) -> bool:
    """Whether a value is an output of its graph."""
    return value.is_graph_output()
