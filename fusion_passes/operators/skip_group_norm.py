"""SkipGroupNorm(X, gamma, beta, skip, bias?) -> GroupNorm of s = X + bias + skip, and s.

skip has the shape of X, or is one number per channel.
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators.parts import has, normalize, sum_and_normal
from fusion_passes.operators.record import Operator, never


def body(node: ir.Node) -> tuple[str, str]:
    """Its form and its meaning in standard ONNX."""
    last = node.attributes["channels_last"].as_int()
    enter = "s_nchw = Transpose <perm = [0, 3, 1, 2]> (S)" if last else "s_nchw = Identity (S)"
    leave = "Y = Transpose <perm = [0, 2, 3, 1]> (y_nchw)" if last else "Y = Identity (y_nchw)"
    bias = has(node, 4)  # beside channels-last tensors only
    inputs = "X, gamma, beta, skip, bias" if bias else "X, gamma, beta, skip"
    total = "biased = Add (X, bias)  S = Add (biased, skip)" if bias else "S = Add (X, skip)"
    body = f"({inputs}) => (Y, S) {{ {total} {enter} {normalize('s_nchw')} {leave} }}"
    return ("nhwc" if last else "nchw") + ("_bias" if bias else ""), body


OPERATOR = Operator(
    "SkipGroupNorm",
    sum_and_normal,
    body,
    ("groups", "epsilon", "activation", "channels_last"),
    images=(0, 3),
    float32_inputs=(1, 2),
    on_cpu=never,
)
