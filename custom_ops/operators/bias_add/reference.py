"""NumPy reference of BiasAdd: Y = X + bias + skip, which may be absent."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from custom_ops.operator_spec import Array


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """X (N, S, C), bias (C), skip (N, S, C) -> Y (N, S, C) in float64."""
    y = inputs["X"].astype(np.float64) + inputs["bias"].astype(np.float64)
    return {"Y": y + inputs["skip"].astype(np.float64) if "skip" in inputs else y}
