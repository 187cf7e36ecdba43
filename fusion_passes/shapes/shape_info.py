"""Inferred shapes and integer contents of a graph's values, and shape arithmetic that the inference rules share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from fusion_passes.shapes.dims import Dim, constant, symbol

Shape = tuple[Dim, ...]

INT64_LIMIT = 1 << 63  # a larger product of declared sizes is treated as a symbolic size
LIST_LIMIT = 64  # maximum elements of an integer tensor in data propagation; shapes, axes and indices have fewer


@dataclass
class ShapeInfo:
    """Inferred shapes of a graph's values, and the elements of integer scalars and vectors.

    `multiples`: a factor of each named size that has one. `concat_equalities`: pairs of sizes that a Concat requires
    to be equal. `broadcast_equalities`: pairs that broadcasting requires to be equal, or one of them to be 1.
    `assume_equal_broadcast`: the result of broadcasting two symbolic sizes is the first one. This collects pairs
    without creating new symbols.
    """

    shapes: dict[ir.Value, Shape] = field(default_factory=dict)
    elements: dict[ir.Value, list[Dim]] = field(default_factory=dict)
    multiples: dict[str, int] = field(default_factory=dict)
    concat_equalities: list[tuple[Dim, Dim]] = field(default_factory=list)
    broadcast_equalities: list[tuple[Dim, Dim]] = field(default_factory=list)
    assume_equal_broadcast: bool = False

    def known_ints(self, value: ir.Value | None) -> list[int] | None:
        """Return the integer elements of a value, or None if one of them is unknown."""
        if value is None or value not in self.elements:
            return None
        elements = [element.value for element in self.elements[value]]
        ints = [n for n in elements if n is not None and -INT64_LIMIT <= n < INT64_LIMIT]
        return ints if len(ints) == len(elements) else None


def broadcast(shapes: Sequence[Shape], info: ShapeInfo) -> Shape:
    """Return the NumPy broadcast of `shapes`. If two symbolic sizes differ, the result is a new symbol."""
    rank = max(len(s) for s in shapes)
    result = []
    for axis in range(rank):
        sizes = [s[axis - rank + len(s)] for s in shapes if axis - rank + len(s) >= 0]
        dims = [d for d in dict.fromkeys(sizes) if d != constant(1)]
        constants = [d for d in dims if d.value is not None]
        if not dims:
            result.append(constant(1))
        elif constants or len(dims) == 1:
            result.append(constants[0] if constants else dims[0])
        else:
            info.broadcast_equalities += [(dims[0], d) for d in dims[1:]]
            opaque = symbol("max(" + ", ".join(sorted(map(str, dims))) + ")")
            result.append(dims[0] if info.assume_equal_broadcast else opaque)
    return tuple(result)


def input_shape(node: ir.Node, index: int, info: ShapeInfo) -> Shape:
    """Return the shape of a node's input, which must exist and have a known shape."""
    value = node.inputs[index]
    assert value is not None
    return info.shapes[value]


def window_attributes(node: ir.Node, spatial: int) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """Return strides, dilations and pads of a convolution or pooling over `spatial` axes."""
    get = node.attributes.get_ints
    return get("strides") or [1] * spatial, get("dilations") or [1] * spatial, get("pads") or [0] * (2 * spatial)


def product(dims: Sequence[Dim]) -> Dim:
    return math.prod(dims, start=constant(1))


def normalize_axis(axis: int, rank: int) -> int:
    """Return a non-negative axis for an axis that may be negative."""
    return axis + rank if axis < 0 else axis


def input_ints(node: ir.Node, index: int, info: ShapeInfo) -> list[int] | None:
    """Return the integer elements of a node's input `index`, or None if one of them is unknown."""
    return info.known_ints(node.inputs[index]) if len(node.inputs) > index else None


def quotient(numerator: list[Dim], denominator: list[Dim]) -> Dim | None:
    """Return product(numerator) / product(denominator), or None if common factors do not cancel the denominator."""
    dividends, divisors = list(numerator), list(denominator)
    for d in denominator:
        if d in dividends:
            dividends.remove(d)
            divisors.remove(d)
    top, bottom = product(dividends), product(divisors)
    if bottom.value and all(factor % bottom.value == 0 for _, factor in top.terms):
        return top // bottom.value
    if len(top.terms) == 1 and len(bottom.terms) == 1:
        (atoms, factor), (divisor_atoms, divisor) = top.terms[0], bottom.terms[0]
        remaining = list(atoms)
        for atom in divisor_atoms:
            if atom not in remaining:
                return None
            remaining.remove(atom)
        return Dim(((tuple(remaining), factor // divisor),)) if divisor and factor % divisor == 0 else None
    return None
