"""Bfloat16Attention(query, key?, value?; num_heads, scale): MultiHeadAttention, packed or not, without a mask.

query, key and value, all float32 or all bfloat16 as the output, are rounded to bfloat16, and so are the weights of the
softmax, which function bodies leave in float32; sums are in float32."""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators import multi_head_attention
from fusion_passes.operators.record import Operator, never


def body(node: ir.Node) -> tuple[str, str]:
    """Its form and its meaning in standard ONNX."""
    form, inputs, statements = multi_head_attention.parts_of_body(node, "_rounded")
    rounded = "".join(
        f"{n}_16 = Cast <to = 16> ({n})  {n}_rounded = Cast <to = 1> ({n}_16)  " for n in inputs.split(", ")
    )
    statements = statements.replace("output = Reshape", "wide = Reshape")
    return form, f"({inputs}) => (output) {{ {rounded} {statements} output = CastLike (wide, query) }}"


OPERATOR = Operator(
    "Bfloat16Attention",
    multi_head_attention.shape,
    body,
    ("num_heads", "scale"),
    on_cpu=never,
)
