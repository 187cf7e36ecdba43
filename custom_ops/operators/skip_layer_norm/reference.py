"""SkipLayerNormalization in NumPy, float64."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from custom_ops.operator_spec import Array


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """input (N, S, C), skip (N or 1, S, C) or (S, C); gamma, beta?, bias? (C) -> output and the sum, as input."""
    total = inputs["input"].astype(np.float64) + inputs["skip"].astype(np.float64)
    if "bias" in inputs:
        total = total + inputs["bias"].astype(np.float64)
    mean = total.mean(axis=-1, keepdims=True)
    variance = total.var(axis=-1, keepdims=True)
    output = (total - mean) / np.sqrt(variance + attributes.get("epsilon", 1e-12)) * inputs["gamma"].astype(np.float64)
    if "beta" in inputs:
        output = output + inputs["beta"].astype(np.float64)
    return {"output": output, "input_skip_bias_sum": total}
