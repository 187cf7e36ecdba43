"""WinogradConv(X, W, B): Conv of X [N,C,H,W] with 3 x 3 filters W [M,C,3,3], strides and pads 1."""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators.record import Operator
from fusion_passes.shapes.facts import Facts, Shape, shape_of


def body(node: ir.Node) -> tuple[str, str]:
    """Its form and its meaning in standard ONNX."""
    return "", "(X, W, B) => (Y) { Y = Conv <pads = [1, 1, 1, 1]> (X, W, B) }"


def shape(node: ir.Node, facts: Facts) -> list[Shape] | None:
    """The shape of the output, or None when it is not known."""
    x, weight = shape_of(node, 0, facts), facts.shapes.get(node.inputs[1]) if node.inputs[1] else None
    return None if weight is None or len(x) != 4 else [(x[0], weight[0], *x[2:])]


OPERATOR = Operator(
    "WinogradConv",
    shape,
    body,
)
