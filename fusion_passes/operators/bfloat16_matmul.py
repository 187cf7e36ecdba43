"""Bfloat16MatMul(X, W, bias?) = X W + bias; X [..., K], float32, and W [K, N], float32 or bfloat16, are rounded to
bfloat16 and summed in float32; bias [N]."""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators.bfloat16_conv import ROUNDED
from fusion_passes.operators.parts import has
from fusion_passes.operators.record import Operator
from fusion_passes.shapes.rules import matmul


def body(node: ir.Node) -> tuple[str, str]:
    """Its form and its meaning in standard ONNX."""
    if has(node, 2):
        return "bias", f"(X, W, bias) => (Y) {{ {ROUNDED}  Z = MatMul (X_rounded, W_rounded)  Y = Add (Z, bias) }}"
    return "", f"(X, W) => (Y) {{ {ROUNDED}  Y = MatMul (X_rounded, W_rounded) }}"


OPERATOR = Operator(
    "Bfloat16MatMul",
    matmul,
    body,
)
