"""SkipLayerNormalization(X, skip, gamma, beta, bias?) -> y, mean, inverse deviation, s.

y is the layer normalization (Ba et al., 2016) of s = X + bias + skip over the last axis.
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators.parts import has, sum_and_normal
from fusion_passes.operators.record import Operator


def body(node: ir.Node) -> tuple[str, str]:
    """Its form and its meaning in standard ONNX."""
    bias = has(node, 4)
    total = "biased = Add (X, bias)  S = Add (biased, skip)" if bias else "S = Add (X, skip)"
    inputs = "X, skip, gamma, beta, bias" if bias else "X, skip, gamma, beta"
    norm = "Y, mean, inv_std = LayerNormalization <axis = -1, epsilon: float = @epsilon> (S, gamma, beta)"
    return "bias" if bias else "", f"({inputs}) => (Y, mean, inv_std, S) {{ {total} {norm} }}"


OPERATOR = Operator(
    "SkipLayerNormalization",
    sum_and_normal,
    body,
    ("epsilon",),
    statistics=(1, 2),
)
