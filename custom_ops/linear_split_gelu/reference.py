"""LinearSplitGelu in NumPy, float64."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from custom_ops.bias_split_gelu import reference as gate
from custom_ops.op import Array


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """X (..., K), W (K, 2 N), bias (2 N) -> Y (..., N) = left * gelu(right) of the halves of X W + bias."""
    product = inputs["X"].astype(np.float64) @ inputs["W"].astype(np.float64)
    return gate.reference({"X": product, "bias": inputs["bias"]}, attributes)
