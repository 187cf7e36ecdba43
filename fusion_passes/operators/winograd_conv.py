"""WinogradConv(X, W, B): Conv of X [N,C,H,W] with 3 x 3 filters W [M,C,3,3], strides and pads 1."""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators.definition import FusedOperator
from fusion_passes.shapes.shape_info import Shape, ShapeInfo, input_shape


def body(node: ir.Node) -> tuple[str, str]:
    return "", "(X, W, B) => (Y) { Y = Conv <pads = [1, 1, 1, 1]> (X, W, B) }"


def shape(node: ir.Node, info: ShapeInfo) -> list[Shape] | None:
    x, weight = input_shape(node, 0, info), info.shapes.get(node.inputs[1]) if node.inputs[1] else None
    return None if weight is None or len(x) != 4 else [(x[0], weight[0], *x[2:])]


OPERATOR = FusedOperator("WinogradConv", shape, body)
