"""NumPy reference of LinearSplitGelu: X W + bias in halves, left * gelu(right)."""

from __future__ import annotations

from collections.abc import Mapping

from custom_ops.operator_spec import Array
from custom_ops.operators.bias_split_gelu import reference as bias_split_gelu
from custom_ops.operators.linear_add import reference as linear_add


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """X (..., K), W (K, D), bias (D) -> Y (..., D / 2) in float64."""
    product = linear_add.reference({"X": inputs["X"], "W": inputs["W"]}, {})["Y"]
    return bias_split_gelu.reference({"X": product, "bias": inputs["bias"]}, {})
