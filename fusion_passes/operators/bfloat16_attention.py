"""Bfloat16Attention(query, key?, value?; num_heads, kv_num_heads?, scale): MultiHeadAttention without a mask.

query, key, value and the output are all float32 or all bfloat16. Inputs and the softmax weights are rounded to
bfloat16, and sums are in float32. Function bodies keep the softmax weights in float32.
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators import multi_head_attention
from fusion_passes.operators.definition import FusedOperator, never


def body(node: ir.Node) -> tuple[str, str]:
    overload, inputs, statements = multi_head_attention.body_parts(node, "_rounded")
    rounded = "".join(
        f"{n}_16 = Cast <to = 16> ({n})  {n}_rounded = Cast <to = 1> ({n}_16)  " for n in inputs.split(", ")
    )
    statements = statements.replace("output = Reshape", "wide = Reshape")
    return overload, f"({inputs}) => (output) {{ {rounded} {statements} output = CastLike (wide, query) }}"


OPERATOR = FusedOperator(
    "Bfloat16Attention", multi_head_attention.shape, body, ("num_heads", "kv_num_heads", "scale"), has_cpu_kernel=never
)
