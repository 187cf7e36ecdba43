"""LinearAdd(X, W, bias?, skip?) = X W + bias + skip; X [..., K], W [K, N], bias [N], skip [..., N]."""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators.parts import has
from fusion_passes.operators.record import Operator
from fusion_passes.shapes.rules import matmul


def body(node: ir.Node) -> tuple[str, str]:
    """Its form and its meaning in standard ONNX."""
    bias, skip = has(node, 2), has(node, 3)
    form = "_".join(word for word, there in (("bias", bias), ("skip", skip)) if there)
    inputs = "X, W, bias, skip" if skip else "X, W, bias" if bias else "X, W"
    biased = "biased = Add (product, bias)" if bias else "biased = Identity (product)"
    total = "Y = Add (biased, skip)" if skip else "Y = Identity (biased)"
    return form, f"({inputs}) => (Y) {{ product = MatMul (X, W)  {biased}  {total} }}"


OPERATOR = Operator(
    "LinearAdd",
    matmul,
    body,
    counted=False,
)
