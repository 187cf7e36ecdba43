"""GroupNorm(X, gamma, beta; groups, activation, channels_last): group normalization (Wu and He, 2018).

SiLU follows if activation is 1. X is [N,C,H,W], or [N,H,W,C] if channels_last is 1; gamma and beta are [C].
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators.body_snippets import normalize, same_as_first_input
from fusion_passes.operators.definition import FusedOperator, never


def body(node: ir.Node) -> tuple[str, str]:
    last = node.attributes["channels_last"].as_int()
    enter = "x_nchw = Transpose <perm = [0, 3, 1, 2]> (X)" if last else "x_nchw = Identity (X)"
    leave = "Y = Transpose <perm = [0, 2, 3, 1]> (y_nchw)" if last else "Y = Identity (y_nchw)"
    return "nhwc" if last else "nchw", f"(X, gamma, beta) => (Y) {{ {enter} {normalize('x_nchw')} {leave} }}"


OPERATOR = FusedOperator(
    "GroupNorm",
    same_as_first_input,
    body,
    ("groups", "epsilon", "activation", "channels_last"),
    image_inputs=(0,),
    float32_inputs=(1, 2),
    has_cpu_kernel=never,
    float8_output=1,
)
