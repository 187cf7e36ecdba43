"""Shape rules of Tile, Einsum, GatherND, TopK and similar operators, and of less common elementwise ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from fusion_passes.shapes.dims import Dim, constant, symbol
from fusion_passes.shapes.shape_info import Shape, ShapeInfo, broadcast, input_shape, normalize_axis, product


def _tile(node: ir.Node, info: ShapeInfo) -> list[Shape] | None:
    x, repeats = input_shape(node, 0, info), info.elements.get(node.inputs[1]) if node.inputs[1] else None
    if repeats is None or len(repeats) != len(x):
        return [tuple(symbol(f"{node.outputs[0].name}_{i}") for i in range(len(x)))]
    return [tuple(d * times for d, times in zip(x, repeats, strict=True))]


def einsum_labels(node: ir.Node) -> tuple[list[str], str] | None:
    """Return the labels of an Einsum's operands and of its result, or None if it has an ellipsis or a diagonal."""
    equation = node.attributes.get_string("equation", "")
    left, arrow, right = (equation or "").replace(" ", "").partition("->")
    operands = left.split(",")
    if "." in left or len(operands) != len(node.inputs) or any(len(set(o)) != len(o) for o in operands):
        return None
    if not arrow:  # implicit: the labels that occur once, in alphabetical order
        right = "".join(sorted(label for label in set(left) - {","} if left.count(label) == 1))
    return operands, right


def _einsum(node: ir.Node, info: ShapeInfo) -> list[Shape] | None:
    parsed = einsum_labels(node)
    if parsed is None:
        return None
    sizes: dict[str, Dim] = {}
    for operand, value in zip(parsed[0], node.inputs, strict=True):
        shape = info.shapes.get(value) if value is not None else None
        if shape is None or len(shape) != len(operand):
            return None
        for label, size in zip(operand, shape, strict=True):
            # ONNX Runtime broadcasts a 1; two symbolic sizes of a label must be equal, so the first one is used.
            if label not in sizes or sizes[label] == constant(1):
                sizes[label] = size
    return [tuple(sizes[label] for label in parsed[1])]


def _gather_nd(node: ir.Node, info: ShapeInfo) -> list[Shape] | None:
    x, indices = input_shape(node, 0, info), info.shapes.get(node.inputs[1]) if node.inputs[1] else None
    depth = indices[-1].value if indices else None
    if indices is None or depth is None:
        return None
    return [(*indices[:-1], *x[node.attributes.get_int("batch_dims", 0) + depth :])]


def _gather_elements(node: ir.Node, info: ShapeInfo) -> list[Shape] | None:
    indices = info.shapes.get(node.inputs[1]) if node.inputs[1] else None
    return None if indices is None else [indices]


def _top_k(node: ir.Node, info: ShapeInfo) -> list[Shape]:
    x = input_shape(node, 0, info)
    axis = normalize_axis(node.attributes.get_int("axis", -1), len(x))
    count = info.elements.get(node.inputs[1]) if node.inputs[1] else None
    size = count[0] if count else symbol(f"{node.outputs[0].name}_{axis}")
    return [(*x[:axis], size, *x[axis + 1 :])] * len(node.outputs)


def _one_hot(node: ir.Node, info: ShapeInfo) -> list[Shape]:
    x = input_shape(node, 0, info)
    axis = normalize_axis(node.attributes.get_int("axis", -1), len(x) + 1)
    depth = info.elements.get(node.inputs[1]) if node.inputs[1] else None
    return [(*x[:axis], depth[0] if depth else symbol(f"{node.outputs[0].name}_{axis}"), *x[axis:])]


def _non_zero(node: ir.Node, info: ShapeInfo) -> list[Shape]:
    return [(constant(len(input_shape(node, 0, info))), symbol(f"{node.outputs[0].name}_1"))]


def _flatten(node: ir.Node, info: ShapeInfo) -> list[Shape]:
    x = input_shape(node, 0, info)
    axis = normalize_axis(node.attributes.get_int("axis", 1), len(x))
    return [(product(x[:axis]), product(x[axis:]))]


def _variadic(node: ir.Node, info: ShapeInfo) -> list[Shape] | None:
    shapes = [info.shapes.get(v) for v in node.inputs if v is not None]
    return None if any(s is None for s in shapes) else [broadcast([s for s in shapes if s is not None], info)]


def _same(node: ir.Node, info: ShapeInfo) -> list[Shape]:
    return [input_shape(node, 0, info)]


Rule = Callable[[ir.Node, ShapeInfo], Sequence[tuple[Dim, ...] | None] | None]
INDEXING: dict[str, Rule] = {
    "Bernoulli": _same, "BitwiseNot": _same, "CastLike": _same, "CumSum": _same, "Einsum": _einsum, "EyeLike": _same,
    "Flatten": _flatten, "GatherElements": _gather_elements, "GatherND": _gather_nd, "Hardmax": _same,
    "Mean": _variadic, "NonZero": _non_zero, "OneHot": _one_hot, "RandomNormalLike": _same, "RandomUniformLike": _same,
    "ReverseSequence": _same,
    "ScatterElements": _same, "ScatterND": _same, "Shrink": _same, "Size": lambda *_: [()],
    "Sum": _variadic, "Tile": _tile, "TopK": _top_k, "Trilu": _same,
}  # fmt: skip
