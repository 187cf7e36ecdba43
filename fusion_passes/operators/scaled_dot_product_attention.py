"""ScaledDotProductAttention(Q, K, V, mask?; scale) = softmax(Q K^T * scale + mask) V (Vaswani et al., 2017).

Q [B,H,S,D], K [B,H,L,D], V [B,H,L,E]. With attribute softcap the scores are softcap * tanh(Q K^T * scale / softcap).
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators.body_snippets import attend, attention_overload, has
from fusion_passes.operators.definition import FusedOperator
from fusion_passes.shapes.rules import attention


def body(node: ir.Node) -> tuple[str, str]:
    mask = has(node, 3)
    inputs = "Q, K, V, mask" if mask else "Q, K, V"
    body = f"({inputs}) => (Y) {{ {attend('Q', 'K', 'V', node, 'mask' if mask else '')} Y = Identity (heads) }}"
    return attention_overload(node, mask), body


OPERATOR = FusedOperator("ScaledDotProductAttention", attention, body, ("scale", "is_causal"), in_summary=False)
