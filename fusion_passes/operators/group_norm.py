"""GroupNorm(X, gamma, beta; groups): mean and variance over each group of channels and all positions (Wu and He, 2018).

SiLU follows where activation is 1; X [N,C,H,W], or [N,H,W,C] where channels_last is 1; gamma and beta [C].
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators.parts import as_first, normalize
from fusion_passes.operators.record import Operator, never


def body(node: ir.Node) -> tuple[str, str]:
    """Its form and its meaning in standard ONNX."""
    last = node.attributes["channels_last"].as_int()
    enter = "x_nchw = Transpose <perm = [0, 3, 1, 2]> (X)" if last else "x_nchw = Identity (X)"
    leave = "Y = Transpose <perm = [0, 2, 3, 1]> (y_nchw)" if last else "Y = Identity (y_nchw)"
    return "nhwc" if last else "nchw", f"(X, gamma, beta) => (Y) {{ {enter} {normalize('x_nchw')} {leave} }}"


OPERATOR = Operator(
    "GroupNorm",
    as_first,
    body,
    ("groups", "epsilon", "activation", "channels_last"),
    images=(0,),
    float32_inputs=(1, 2),
    on_cpu=never,
)
