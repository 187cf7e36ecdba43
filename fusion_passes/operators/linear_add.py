"""LinearAdd(X, W, bias?, skip?; gelu) = X W + bias + skip; X [..., K], W [K, N], bias [N], skip [..., N].

With `gelu`, which excludes a skip, it is GELU of the sum by tanh.
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators.body_snippets import has
from fusion_passes.operators.definition import FusedOperator
from fusion_passes.shapes.rules import matmul


def body(node: ir.Node) -> tuple[str, str]:
    bias, skip = has(node, 2), has(node, 3)
    gelu = bool(node.attributes.get_int("gelu", 0))
    overload = "_".join(word for word, used in (("bias", bias), ("skip", skip), ("gelu", gelu)) if used)
    inputs = "X, W, bias, skip" if skip else "X, W, bias" if bias else "X, W"
    biased = "biased = Add (product, bias)" if bias else "biased = Identity (product)"
    total = "Y = Add (biased, skip)" if skip else "Y = Identity (biased)"
    if gelu:
        total = 'Y = Gelu <approximate = "tanh"> (biased)'
    return overload, f"({inputs}) => (Y) {{ product = MatMul (X, W)  {biased}  {total} }}"


OPERATOR = FusedOperator("LinearAdd", matmul, body, ("gelu",), in_summary=False)
