"""BiasAdd in NumPy: Y = X + bias + skip."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from custom_ops.op import Array


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """X (N, S, C), bias (C), skip (N, S, C) -> Y (N, S, C) in float64."""
    x, bias, skip = (inputs[name].astype(np.float64) for name in ("X", "bias", "skip"))
    return {"Y": x + bias + skip}
