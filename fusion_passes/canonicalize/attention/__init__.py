"""Attention: rewrites all patterns to sd_ort.ScaledDotProductAttention(q, k, v, mask?; scale) on [B,H,S,D].

`scales` merges the scales first. Each of the other modules has the rules of one pattern.
"""

from __future__ import annotations

from fusion_passes.canonicalize.attention import matmul_softmax, merged_heads, onnx_attention, three_axis
from fusion_passes.rule import rule_pass

RULES = (*matmul_softmax.RULES, *merged_heads.RULES, *onnx_attention.RULES, *three_axis.RULES)
CASES = (*matmul_softmax.CASES, *merged_heads.CASES, *onnx_attention.CASES, *three_axis.CASES)

PASS = rule_pass("attention", RULES, CASES)
