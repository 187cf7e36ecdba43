"""NumPy float64 reference of SkipGroupNorm: GroupNorm of X + skip + bias, and that sum."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from custom_ops.operator_spec import Array
from custom_ops.operators.group_norm.reference import group_norm


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """X, skip (N, ..., C) or skip (N, C), (N, 1, 1, C); gamma, beta, bias (C) -> Y and S as X."""
    x, gamma, beta, skip = (inputs[name].astype(np.float64) for name in ("X", "gamma", "beta", "skip"))
    channels = 1 if attributes.get("channels_last", 1) == 0 else x.ndim - 1
    if skip.shape != x.shape:
        skip = skip.reshape([n if axis in (0, channels) else 1 for axis, n in enumerate(x.shape)])
    total = x + skip
    if "bias" in inputs:
        shape = [n if axis == channels else 1 for axis, n in enumerate(x.shape)]
        total = total + inputs["bias"].astype(np.float64).reshape(shape)
    return {"Y": group_norm(total, gamma, beta, attributes), "S": total}
