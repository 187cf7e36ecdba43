"""SkipLayerNormalization(X, skip, gamma, beta, bias?) -> y, mean, inverse deviation, s, y in float8?.

y is the layer normalization (Ba et al., 2016) of s = X + bias + skip over the last axis.
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators.body_snippets import has, skip_normalization_shapes
from fusion_passes.operators.definition import FusedOperator


def body(node: ir.Node) -> tuple[str, str]:
    bias = has(node, 4)
    total = "biased = Add (X, bias)  S = Add (biased, skip)" if bias else "S = Add (X, skip)"
    inputs = "X, skip, gamma, beta, bias" if bias else "X, skip, gamma, beta"
    norm = "Y, mean, inv_std = LayerNormalization <axis = -1, epsilon: float = @epsilon> (S, gamma, beta)"
    return "bias" if bias else "", f"({inputs}) => (Y, mean, inv_std, S) {{ {total} {norm} }}"


OPERATOR = FusedOperator(
    "SkipLayerNormalization", skip_normalization_shapes, body, ("epsilon",), float32_outputs=(1, 2), float8_output=4
)
