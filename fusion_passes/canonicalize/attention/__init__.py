"""Attention: every spelling becomes sd_ort.ScaledDotProductAttention(q, k, v, mask?; scale), on [B,H,S,D].

`scales` brings the scales together, then `product`, `flat` and `operator` know a spelling each.
"""

from __future__ import annotations

from fusion_passes.canonicalize.attention import batched, flat, operator, product
from fusion_passes.rule import rule_pass

RULES = (*product.RULES, *flat.RULES, *operator.RULES, *batched.RULES)
CASES = (*product.CASES, *flat.CASES, *operator.CASES, *batched.CASES)

PASS = rule_pass("attention", RULES, CASES)
