"""LinearAdd(X, W, bias?, skip?) = X W + bias + skip; X [..., K], W [K, N], bias [N], skip [..., N]."""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators.body_snippets import has
from fusion_passes.operators.definition import FusedOperator
from fusion_passes.shapes.rules import matmul


def body(node: ir.Node) -> tuple[str, str]:
    """Return the overload name and the function body in ONNX text."""
    bias, skip = has(node, 2), has(node, 3)
    overload = "_".join(word for word, used in (("bias", bias), ("skip", skip)) if used)
    inputs = "X, W, bias, skip" if skip else "X, W, bias" if bias else "X, W"
    biased = "biased = Add (product, bias)" if bias else "biased = Identity (product)"
    total = "Y = Add (biased, skip)" if skip else "Y = Identity (biased)"
    return overload, f"({inputs}) => (Y) {{ product = MatMul (X, W)  {biased}  {total} }}"


OPERATOR = FusedOperator("LinearAdd", matmul, body, in_summary=False)
