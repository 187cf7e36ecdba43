"""Data propagation: the elements of small integer tensors (sizes, axes, indices) as symbolic dimensions."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from fusion_passes.shapes.dims import Dim, constant, truncated
from fusion_passes.shapes.rules import reshape, shape_elements
from fusion_passes.shapes.shape_info import LIST_LIMIT, ShapeInfo, input_ints, quotient


def _same_elements(node: ir.Node, info: ShapeInfo) -> list[Dim] | None:
    elements = info.elements.get(node.inputs[0]) if node.inputs[0] else None
    if node.op_type == "Cast" and node.attributes["to"].as_int() not in (ir.DataType.INT64, ir.DataType.INT32):
        return None
    if node.op_type == "Reshape" and elements is not None and len(elements) != 1:
        shape = reshape(node, info)
        return elements if shape and len(shape[0]) == 1 else None
    return elements


def _concat_elements(node: ir.Node, info: ShapeInfo) -> list[Dim] | None:
    parts = [info.elements.get(v) for v in node.inputs if v is not None]
    return None if any(p is None for p in parts) else [d for p in parts if p is not None for d in p]


def _gather_elements(node: ir.Node, info: ShapeInfo) -> list[Dim] | None:
    data = info.elements.get(node.inputs[0]) if node.inputs[0] else None
    indices = info.known_ints(node.inputs[1])
    if data is None or indices is None or node.attributes.get_int("axis", 0) != 0:
        return None
    return [data[i] for i in indices] if all(-len(data) <= i < len(data) for i in indices) else None


def _slice_elements(node: ir.Node, info: ShapeInfo) -> list[Dim] | None:
    data = info.elements.get(node.inputs[0]) if node.inputs[0] else None
    starts, ends, _, steps = (input_ints(node, i, info) for i in range(1, 5))
    if data is None or starts is None or ends is None or len(starts) != 1:
        return None
    return data[starts[0] : ends[0] : steps[0] if steps else 1]


def _broadcast_pairs(node: ir.Node, info: ShapeInfo) -> list[tuple[Dim, Dim]] | None:
    a, b = (info.elements.get(v) if v is not None else None for v in node.inputs[:2])
    if a is None or b is None or (len(a) != len(b) and 1 not in (len(a), len(b))):
        return None
    size = max(len(a), len(b))
    return list(zip(a * (size if len(a) == 1 else 1), b * (size if len(b) == 1 else 1), strict=True))


def _arithmetic(node: ir.Node, info: ShapeInfo) -> list[Dim] | None:
    pairs = _broadcast_pairs(node, info)
    result: list[Dim | None] = [None] if pairs is None else [_combine(node.op_type, x, y) for x, y in pairs]
    return None if any(r is None for r in result) else [r for r in result if r is not None]


def _combine(op_type: str, x: Dim, y: Dim) -> Dim | None:
    match op_type:
        case "Add":
            return x + y
        case "Sub":
            return x - y
        case "Mul":
            return x * y
    # ONNX rounds towards zero, which equals floor division for non-negative numerators.
    if y.value and y.value > 0 and (x.lower_bound or 0) >= 0 and x.lower_bound is not None:
        return x // y.value
    result = quotient([x], [y])
    return truncated(x, y.value) if result is None and y.value and y.value > 0 else result


def _equal(node: ir.Node, info: ShapeInfo) -> list[Dim] | None:
    pairs = _broadcast_pairs(node, info)
    result: list[bool | None] = [None] if pairs is None else [_is_equal(x, y) for x, y in pairs]
    return None if any(r is None for r in result) else [constant(int(bool(r))) for r in result]


def _is_equal(x: Dim, y: Dim) -> bool | None:
    """Return whether two sizes are equal, or None if unknown. Exporters compare sizes with -1, which no size equals."""
    if x == y:
        return True
    if x.value is not None and y.value is not None:
        return False
    low, high = (x, y) if x.value is not None else (y, x)
    if low.value is not None and low.value < 0 and all(factor > 0 for _, factor in high.terms):
        return False
    return None


def _where(node: ir.Node, info: ShapeInfo) -> list[Dim] | None:
    condition = info.known_ints(node.inputs[0])
    a, b = (info.elements.get(v) if v is not None else None for v in node.inputs[1:3])
    if condition is None or a is None or b is None or not len(condition) == len(a) == len(b):
        return None
    return [x if c else y for c, x, y in zip(condition, a, b, strict=True)]


def _constant_elements(node: ir.Node, info: ShapeInfo) -> list[Dim] | None:
    size, tensor = info.known_ints(node.inputs[0]), node.attributes.get_tensor("value")
    if size is None or len(size) != 1 or size[0] > LIST_LIMIT or tensor is None or tensor.dtype != ir.DataType.INT64:
        return None
    return [constant(int(tensor.numpy().ravel()[0]))] * size[0]


ELEMENTS: dict[str, Callable[[ir.Node, ShapeInfo], list[Dim] | None]] = {
    "Add": _arithmetic, "Cast": _same_elements, "Concat": _concat_elements, "ConstantOfShape": _constant_elements,
    "Div": _arithmetic, "Equal": _equal, "Gather": _gather_elements, "Identity": _same_elements, "Mul": _arithmetic,
    "Reshape": _same_elements, "Shape": shape_elements, "Slice": _slice_elements, "Squeeze": _same_elements,
    "Sub": _arithmetic, "Unsqueeze": _same_elements, "Where": _where,
}  # fmt: skip
