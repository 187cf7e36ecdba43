"""QuickGelu(X; alpha) = X * sigmoid(alpha * X) (Hendrycks and Gimpel, 2016, section 2)."""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators.parts import as_first
from fusion_passes.operators.record import Operator


def body(node: ir.Node) -> tuple[str, str]:
    """Its form and its meaning in standard ONNX."""
    return (
        "",
        """(X) => (Y) {
        alpha = Constant <value_float: float = @alpha> ()
        alpha_x = CastLike (alpha, X)
        scaled = Mul (X, alpha_x)
        gate = Sigmoid (scaled)
        Y = Mul (X, gate)
    }""",
    )


OPERATOR = Operator(
    "QuickGelu",
    as_first,
    body,
    ("alpha",),
)
