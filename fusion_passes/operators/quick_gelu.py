"""QuickGelu(X; alpha) = X * sigmoid(alpha * X) (Hendrycks and Gimpel, 2016, section 2)."""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators.body_snippets import same_as_first_input
from fusion_passes.operators.definition import FusedOperator


def body(node: ir.Node) -> tuple[str, str]:
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


OPERATOR = FusedOperator("QuickGelu", same_as_first_input, body, ("alpha",))
