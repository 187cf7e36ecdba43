"""BiasSplitGelu in NumPy, float64."""

from __future__ import annotations

from collections.abc import Mapping
from math import erf, sqrt

import numpy as np

from custom_ops.operator_spec import Array

_erf = np.vectorize(erf, otypes=[np.float64])


def gelu_gate(left: Array, right: Array) -> Array:
    """left * gelu(right)."""
    return left * 0.5 * right * (1 + _erf(right / sqrt(2)))


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """X (N, S, D), bias (D) -> Y (N, S, D / 2) = left * gelu(right)."""
    left, right = np.split(inputs["X"].astype(np.float64) + inputs["bias"].astype(np.float64), 2, axis=-1)
    return {"Y": gelu_gate(left, right)}
