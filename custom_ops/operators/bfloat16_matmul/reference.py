"""NumPy reference of Bfloat16MatMul: float64 product of the rounded inputs, optionally gated."""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from custom_ops.operator_spec import Array
from custom_ops.operators.bias_split_gelu.reference import gelu_gate


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """X (..., K), W (K, N), bias (N) -> Y (..., N)."""
    x, w = (inputs[name].astype(ml_dtypes.bfloat16).astype(np.float64) for name in ("X", "W"))
    y = x @ w + (inputs["bias"].astype(np.float64) if "bias" in inputs else 0)
    if attributes.get("gated", 0):
        left, right = np.split(y, 2, axis=-1)
        y = gelu_gate(left, right)
    return {"Y": y}
