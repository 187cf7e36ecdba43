"""Shape rules of pooling, ConvTranspose, GridSample, DepthToSpace and SpaceToDepth."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from fusion_passes.shapes.dims import Dim, constant
from fusion_passes.shapes.shape_info import Shape, ShapeInfo, input_shape, window_attributes


def _pool(node: ir.Node, info: ShapeInfo) -> list[Shape] | None:
    x = input_shape(node, 0, info)
    kernel = node.attributes.get_ints("kernel_shape")
    if kernel is None or node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
        return None
    spatial = len(x) - 2
    strides, dilations, pads = window_attributes(node, spatial)
    # With ceil_mode, a last window that would start in the padding is skipped; without padding there is none.
    ceil_mode = node.attributes.get_int("ceil_mode", 0)
    if ceil_mode and (any(pads) or any(k < s for k, s in zip(kernel, strides, strict=True))):
        return None
    out = []
    for i in range(spatial):
        extra = pads[i] + pads[i + spatial] - dilations[i] * (kernel[i] - 1) - 1 + (strides[i] - 1 if ceil_mode else 0)
        out.append((x[2 + i] + constant(extra)) // strides[i] + constant(1))
    return [(x[0], x[1], *out)] * len(node.outputs)


def _global_pool(node: ir.Node, info: ShapeInfo) -> list[Shape]:
    x = input_shape(node, 0, info)
    return [(x[0], x[1], *[constant(1)] * (len(x) - 2))]


def _conv_transpose(node: ir.Node, info: ShapeInfo) -> list[Shape] | None:
    x, weight = input_shape(node, 0, info), info.shapes.get(node.inputs[1]) if node.inputs[1] else None
    if (
        weight is None
        or "output_shape" in node.attributes
        or node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET"
    ):
        return None
    spatial = len(x) - 2
    kernel = node.attributes.get_ints("kernel_shape") or [d.value or 1 for d in weight[2:]]
    strides, dilations, pads = window_attributes(node, spatial)
    extra = node.attributes.get_ints("output_padding") or [0] * spatial
    out = []
    for i in range(spatial):
        more = extra[i] + dilations[i] * (kernel[i] - 1) + 1 - pads[i] - pads[i + spatial] - strides[i]
        out.append(x[2 + i] * constant(strides[i]) + constant(more))
    return [(x[0], weight[1] * constant(node.attributes.get_int("group", 1)), *out)]


def _depth_to_space(node: ir.Node, info: ShapeInfo) -> list[Shape]:
    x, block = input_shape(node, 0, info), node.attributes["blocksize"].as_int()
    return [(x[0], x[1] // (block * block), x[2] * constant(block), x[3] * constant(block))]


def _space_to_depth(node: ir.Node, info: ShapeInfo) -> list[Shape]:
    x, block = input_shape(node, 0, info), node.attributes["blocksize"].as_int()
    return [(x[0], x[1] * constant(block * block), x[2] // block, x[3] // block)]


def _grid_sample(node: ir.Node, info: ShapeInfo) -> list[Shape] | None:
    x, grid = input_shape(node, 0, info), info.shapes.get(node.inputs[1]) if node.inputs[1] else None
    return None if grid is None else [(x[0], x[1], *grid[1:-1])]


def _batch_normalization(node: ir.Node, info: ShapeInfo) -> list[Shape | None]:
    return [input_shape(node, 0, info), *[None] * (len(node.outputs) - 1)]


Rule = Callable[[ir.Node, ShapeInfo], Sequence[tuple[Dim, ...] | None] | None]
POOLING: dict[str, Rule] = {
    "AveragePool": _pool, "BatchNormalization": _batch_normalization, "ConvTranspose": _conv_transpose,
    "DepthToSpace": _depth_to_space, "GlobalAveragePool": _global_pool, "GlobalMaxPool": _global_pool,
    "GridSample": _grid_sample, "LpPool": _pool, "MaxPool": _pool, "SpaceToDepth": _space_to_depth,
}  # fmt: skip
