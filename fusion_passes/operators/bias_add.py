"""BiasAdd(X, bias, skip?) = X + bias + skip; X and skip [B,S,C] or [N,H,W,C], bias [C]."""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators.parts import as_first, has
from fusion_passes.operators.record import Operator, never


def body(node: ir.Node) -> tuple[str, str]:
    """Its form and its meaning in standard ONNX."""
    if not has(node, 2):
        return "no_skip", "(X, bias) => (Y) { Y = Add (X, bias) }"
    return "", "(X, bias, skip) => (Y) { biased = Add (X, bias)  Y = Add (biased, skip) }"


OPERATOR = Operator(
    "BiasAdd",
    as_first,
    body,
    on_cpu=never,
)
