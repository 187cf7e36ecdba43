"""QuantizedConv(X, W, scale, B; stride, x_last, y_last): a convolution of int8 elements, for the CPU.

X and W are as in Bfloat16Conv, in int8; Y is their exact convolution times scale, one number or [M] in float32, plus B.
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators import bfloat16_conv
from fusion_passes.operators.definition import FusedOperator


def body(node: ir.Node) -> tuple[str, str]:
    overload, convolution = bfloat16_conv.convolution_body(node, "B")
    return (
        overload,
        f"""(X, W, scale, B) => (Y) {{
        X_rounded = Cast <to = 1> (X)
        elements = Cast <to = 1> (W)
        axes = Constant <value_ints = [-1, 1, 1, 1]> ()
        factors = Reshape (scale, axes)
        W_rounded = Mul (elements, factors)
        {convolution}
    }}""",
    )


OPERATOR = FusedOperator(
    "QuantizedConv", bfloat16_conv.shape, body, ("stride", "x_last", "y_last"), float32_inputs=(2,), dtype_input=3
)
