"""Bfloat16Conv(X, W, B?): Conv of X [N,C,H,W], float32, with filters W [M,C,3,3] (pads 1) or [M,C,1,1], strides 1.

X and W, which is float32 or bfloat16, are rounded to bfloat16 and summed in float32."""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators.parts import has
from fusion_passes.operators.record import Operator
from fusion_passes.operators.winograd_conv import shape

ROUNDED = """x = Cast <to = 16> (X)  X_rounded = Cast <to = 1> (x)
    w = Cast <to = 16> (W)  W_rounded = Cast <to = 1> (w)"""


def body(node: ir.Node) -> tuple[str, str]:
    """Its form and its meaning in standard ONNX."""
    bias = has(node, 2)
    named, last = (", B", "B") if bias else ("", "")
    size = None if node.inputs[1] is None or node.inputs[1].shape is None else node.inputs[1].shape[-1]
    pads = "" if size == 1 else "<pads = [1, 1, 1, 1]> "
    form = ("pixel" if size == 1 else "square") + ("_bias" if bias else "")
    return (
        form,
        f"(X, W{named}) => (Y) {{ {ROUNDED}  Y = Conv {pads}(X_rounded, W_rounded{', ' + last if last else ''}) }}",
    )


OPERATOR = Operator(
    "Bfloat16Conv",
    shape,
    body,
)
