"""Softmax of rows in NumPy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from custom_ops.operator_spec import Array


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """scores (rows, columns) -> weights (rows, columns) in float64, each row of sum 1."""
    scores = inputs["scores"].astype(np.float64)
    powers = np.exp(scores - scores.max(-1, keepdims=True, initial=-np.inf))
    return {"weights": powers / powers.sum(-1, keepdims=True)}
