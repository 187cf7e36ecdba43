"""What shape inference knows of a graph's values, and the arithmetic of shapes that its rules share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from fusion_passes.shapes.dims import Dim, constant, symbol

Shape = tuple[Dim, ...]

INT64_LIMIT = 1 << 63  # a product of declared sizes may lie beyond it, and is then a size like any unknown one
LIST_LIMIT = 64  # longest integer tensor followed element by element: shapes, axes and index lists are shorter


@dataclass
class Facts:
    """What is known about a graph's values: shapes, and the elements of integer scalars and vectors."""

    shapes: dict[ir.Value, Shape] = field(default_factory=dict)
    elements: dict[ir.Value, list[Dim]] = field(default_factory=dict)
    multiples: dict[str, int] = field(default_factory=dict)
    joined: list[tuple[Dim, Dim]] = field(default_factory=list)  # by Concat: equal, or the graph fails
    broadcast: list[tuple[Dim, Dim]] = field(default_factory=list)  # by broadcasting: equal, or one of them is 1
    optimistic: bool = False  # take the first of two broadcast sizes, to collect pairs without piling up unknowns

    def static(self, value: ir.Value | None) -> list[int] | None:
        """The integers a value holds, when all of them are known."""
        if value is None or value not in self.elements:
            return None
        numbers = [element.value for element in self.elements[value]]
        known = [n for n in numbers if n is not None and -INT64_LIMIT <= n < INT64_LIMIT]
        return known if len(known) == len(numbers) else None


def broadcast(shapes: Sequence[Shape], facts: Facts) -> Shape:
    """NumPy broadcasting; where two unknown sizes differ, a size of its own stands for the result."""
    rank = max(len(s) for s in shapes)
    result = []
    for axis in range(rank):
        sizes = [s[axis - rank + len(s)] for s in shapes if axis - rank + len(s) >= 0]
        dims = [d for d in dict.fromkeys(sizes) if d != constant(1)]
        known = [d for d in dims if d.value is not None]
        if not dims:
            result.append(constant(1))
        elif known or len(dims) == 1:
            result.append(known[0] if known else dims[0])
        else:
            facts.broadcast += [(dims[0], d) for d in dims[1:]]
            opaque = symbol("max(" + ", ".join(sorted(map(str, dims))) + ")")
            result.append(dims[0] if facts.optimistic else opaque)
    return tuple(result)


def shape_of(node: ir.Node, index: int, facts: Facts) -> Shape:
    """The shape of a node's input that is there and known."""
    value = node.inputs[index]
    assert value is not None
    return facts.shapes[value]


def product(dims: Sequence[Dim]) -> Dim:
    """The product of sizes."""
    return math.prod(dims, start=constant(1))


def axis_of(axis: int, rank: int) -> int:
    """An axis counted from the front."""
    return axis + rank if axis < 0 else axis


def ints_of(node: ir.Node, index: int, facts: Facts) -> list[int] | None:
    """The integers that a node's input `index` holds, when they are known."""
    return facts.static(node.inputs[index]) if len(node.inputs) > index else None


def quotient(numerator: list[Dim], denominator: list[Dim]) -> Dim | None:
    """product(numerator) / product(denominator), when common factors cancel down to a number or nothing."""
    top, bottom = list(numerator), list(denominator)
    for d in denominator:
        if d in top:
            top.remove(d)
            bottom.remove(d)
    up, down = product(top), product(bottom)
    if down.value and all(factor % down.value == 0 for _, factor in up.terms):
        return up // down.value
    if len(up.terms) == 1 and len(down.terms) == 1:
        (atoms, factor), (divisors, divisor) = up.terms[0], down.terms[0]
        left = list(atoms)
        for atom in divisors:
            if atom not in left:
                return None
            left.remove(atom)
        return Dim(((tuple(left), factor // divisor),)) if divisor and factor % divisor == 0 else None
    return None
