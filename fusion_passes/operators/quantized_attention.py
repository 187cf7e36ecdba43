"""QuantizedAttention(QKV; num_heads, scale, quantized_scale): attention of packed elements [B,S,N,3,D] in float8.

The output [B,S,N*D] is softmax(scale Q K^T) V of the elements as numbers, / quantized_scale in float8. The scale s of
QKV is a factor s^2 of `scale` and a divisor of `quantized_scale`.
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators import multi_head_attention
from fusion_passes.operators.definition import QUANTIZED_SCALE, FusedOperator
from fusion_passes.shapes.shape_info import Shape, ShapeInfo, input_shape


def body(node: ir.Node) -> tuple[str, str]:
    """Return the overload name and the function body in ONNX text."""
    _, _, statements = multi_head_attention.body_parts(node)
    return (
        "",
        f"""(QKV) => (quantized) {{
        query = Cast <to = 1> (QKV)
        {statements}
        divisor = Constant <value_float: float = @{QUANTIZED_SCALE}> ()
        quantized = QuantizeLinear <output_dtype = {int(ir.DataType.FLOAT8E4M3FN)}> (output, divisor)
    }}""",
    )


def shape(node: ir.Node, info: ShapeInfo) -> list[Shape]:
    """Return the output shape."""
    qkv = input_shape(node, 0, info)
    return [(qkv[0], qkv[1], qkv[2] * qkv[4])]


OPERATOR = FusedOperator("QuantizedAttention", shape, body, ("num_heads", "scale", QUANTIZED_SCALE))
