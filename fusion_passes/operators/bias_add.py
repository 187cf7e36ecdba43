"""BiasAdd(X, bias, skip?) = X + bias + skip; X and skip [B,S,C] or [N,H,W,C], bias [C]."""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators.body_snippets import has, same_as_first_input
from fusion_passes.operators.definition import FusedOperator, never


def body(node: ir.Node) -> tuple[str, str]:
    if not has(node, 2):
        return "no_skip", "(X, bias) => (Y) { Y = Add (X, bias) }"
    return "", "(X, bias, skip) => (Y) { biased = Add (X, bias)  Y = Add (biased, skip) }"


OPERATOR = FusedOperator("BiasAdd", same_as_first_input, body, has_cpu_kernel=never)
