"""NumPy reference of LinearAdd: Y = X W + bias + skip."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from custom_ops.operator_spec import Array


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """X (..., K), W (K, N), bias (N) or absent, skip (..., N) or absent -> Y (..., N) in float64."""
    y = inputs["X"].astype(np.float64) @ inputs["W"].astype(np.float64)
    for name in ("bias", "skip"):
        if name in inputs:
            y = y + inputs[name].astype(np.float64)
    return {"Y": y}
