"""AdaptiveNorm in NumPy, float64."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from custom_ops.operator_spec import Array


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """X (B, ..., C), scale, shift?, gate? (C) or (B, 1, ..., C), skip? as X -> Y and sum, as X."""
    arrays = {name: array.astype(np.float64) for name, array in inputs.items()}
    total = arrays["X"] * arrays.get("gate", 1.0) + arrays.get("skip", 0.0)
    centered = total if attributes.get("rms", 0) else total - total.mean(axis=-1, keepdims=True)
    variance = np.square(centered).mean(axis=-1, keepdims=True)
    normal = centered / np.sqrt(variance + attributes.get("epsilon", 1e-5))
    return {"Y": normal * arrays["scale"] + arrays.get("shift", 0.0), "sum": total}
