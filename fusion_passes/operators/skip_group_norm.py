"""SkipGroupNorm(X, gamma, beta, skip, bias?) -> GroupNorm of s = X + bias + skip, and s.

skip has the shape of X, or one element per channel ([N,C,1,1]).
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators.body_snippets import has, normalize, skip_normalization_shapes
from fusion_passes.operators.definition import FusedOperator, never


def body(node: ir.Node) -> tuple[str, str]:
    last = node.attributes["channels_last"].as_int()
    enter = "s_nchw = Transpose <perm = [0, 3, 1, 2]> (S)" if last else "s_nchw = Identity (S)"
    leave = "Y = Transpose <perm = [0, 2, 3, 1]> (y_nchw)" if last else "Y = Identity (y_nchw)"
    bias = has(node, 4)  # with channels_last only
    inputs = "X, gamma, beta, skip, bias" if bias else "X, gamma, beta, skip"
    total = "biased = Add (X, bias)  S = Add (biased, skip)" if bias else "S = Add (X, skip)"
    body = f"({inputs}) => (Y, S) {{ {total} {enter} {normalize('s_nchw')} {leave} }}"
    return ("nhwc" if last else "nchw") + ("_bias" if bias else ""), body


OPERATOR = FusedOperator(
    "SkipGroupNorm",
    skip_normalization_shapes,
    body,
    ("groups", "epsilon", "activation", "channels_last"),
    image_inputs=(0, 3),
    float32_inputs=(1, 2),
    has_cpu_kernel=never,
    float8_output=2,
)
