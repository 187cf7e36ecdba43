"""Shape rules of operators that repeat, pick and contract: Tile, Einsum, GatherND, TopK and their kin."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from fusion_passes.shapes.dims import Dim, constant, symbol
from fusion_passes.shapes.facts import Facts, Shape, axis_of, broadcast, product, shape_of


def _tile(node: ir.Node, facts: Facts) -> list[Shape] | None:
    x, repeats = shape_of(node, 0, facts), facts.elements.get(node.inputs[1]) if node.inputs[1] else None
    if repeats is None or len(repeats) != len(x):
        return [tuple(symbol(f"{node.outputs[0].name}_{i}") for i in range(len(x)))]
    return [tuple(d * times for d, times in zip(x, repeats, strict=True))]


def labels(node: ir.Node) -> tuple[list[str], str] | None:
    """The labels of an Einsum's operands and of its result, or None: an ellipsis, a diagonal, another spelling."""
    equation = node.attributes.get_string("equation", "")
    left, arrow, right = (equation or "").replace(" ", "").partition("->")
    operands = left.split(",")
    if "." in left or len(operands) != len(node.inputs) or any(len(set(o)) != len(o) for o in operands):
        return None
    if not arrow:  # implicit: the labels that are there once, in alphabetical order
        right = "".join(sorted(label for label in set(left) - {","} if left.count(label) == 1))
    return operands, right


def _einsum(node: ir.Node, facts: Facts) -> list[Shape] | None:
    parsed = labels(node)
    if parsed is None:
        return None
    sizes: dict[str, Dim] = {}
    for operand, value in zip(parsed[0], node.inputs, strict=True):
        shape = facts.shapes.get(value) if value is not None else None
        if shape is None or len(shape) != len(operand):
            return None
        for label, size in zip(operand, shape, strict=True):
            # ONNX Runtime broadcasts a 1; of two unknown sizes, which must be equal, the first stands for both.
            if label not in sizes or sizes[label] == constant(1):
                sizes[label] = size
    return [tuple(sizes[label] for label in parsed[1])]


def _gather_nd(node: ir.Node, facts: Facts) -> list[Shape] | None:
    x, indices = shape_of(node, 0, facts), facts.shapes.get(node.inputs[1]) if node.inputs[1] else None
    depth = indices[-1].value if indices else None
    if indices is None or depth is None:
        return None
    return [(*indices[:-1], *x[node.attributes.get_int("batch_dims", 0) + depth :])]


def _gather_elements(node: ir.Node, facts: Facts) -> list[Shape] | None:
    indices = facts.shapes.get(node.inputs[1]) if node.inputs[1] else None
    return None if indices is None else [indices]


def _top_k(node: ir.Node, facts: Facts) -> list[Shape]:
    x = shape_of(node, 0, facts)
    axis = axis_of(node.attributes.get_int("axis", -1), len(x))
    count = facts.elements.get(node.inputs[1]) if node.inputs[1] else None
    size = count[0] if count else symbol(f"{node.outputs[0].name}_{axis}")
    return [(*x[:axis], size, *x[axis + 1 :])] * len(node.outputs)


def _one_hot(node: ir.Node, facts: Facts) -> list[Shape]:
    x = shape_of(node, 0, facts)
    axis = axis_of(node.attributes.get_int("axis", -1), len(x) + 1)
    depth = facts.elements.get(node.inputs[1]) if node.inputs[1] else None
    return [(*x[:axis], depth[0] if depth else symbol(f"{node.outputs[0].name}_{axis}"), *x[axis:])]


def _non_zero(node: ir.Node, facts: Facts) -> list[Shape]:
    return [(constant(len(shape_of(node, 0, facts))), symbol(f"{node.outputs[0].name}_1"))]


def _flatten(node: ir.Node, facts: Facts) -> list[Shape]:
    x = shape_of(node, 0, facts)
    axis = axis_of(node.attributes.get_int("axis", 1), len(x))
    return [(product(x[:axis]), product(x[axis:]))]


def _variadic(node: ir.Node, facts: Facts) -> list[Shape] | None:
    shapes = [facts.shapes.get(v) for v in node.inputs if v is not None]
    return None if any(s is None for s in shapes) else [broadcast([s for s in shapes if s is not None], facts)]


def _same(node: ir.Node, facts: Facts) -> list[Shape]:
    return [shape_of(node, 0, facts)]


def _scalar(node: ir.Node, facts: Facts) -> list[Shape]:
    return [()]


Rule = Callable[[ir.Node, Facts], Sequence[tuple[Dim, ...] | None] | None]
INDEXING: dict[str, Rule] = {
    "Bernoulli": _same, "BitwiseNot": _same, "CastLike": _same, "CumSum": _same, "Einsum": _einsum, "EyeLike": _same,
    "Flatten": _flatten, "GatherElements": _gather_elements, "GatherND": _gather_nd, "Hardmax": _same,
    "Mean": _variadic, "NonZero": _non_zero, "OneHot": _one_hot, "RandomNormalLike": _same, "RandomUniformLike": _same,
    "ReverseSequence": _same,
    "ScatterElements": _same, "ScatterND": _same, "Shrink": _same, "Size": _scalar,
    "Sum": _variadic, "Tile": _tile, "TopK": _top_k, "Trilu": _same,
}  # fmt: skip
