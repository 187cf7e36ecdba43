"""NumPy float64 reference of GroupNorm: Wu and He, "Group Normalization" (2018), with SiLU behind it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from custom_ops.operator_spec import Array


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """X (N, ..., C), or (N, C, ...) with channels_last 0; gamma, beta (C) -> Y as X."""
    x, gamma, beta = (inputs[name].astype(np.float64) for name in ("X", "gamma", "beta"))
    return {"Y": group_norm(x, gamma, beta, attributes)}


def group_norm(x: Array, gamma: Array, beta: Array, attributes: Mapping[str, int | float]) -> Array:
    """The normalization itself, all arguments float64."""
    if attributes.get("channels_last", 1):
        x = np.moveaxis(x, -1, 1)
    groups = int(attributes["groups"])
    grouped = x.reshape(x.shape[0], groups, -1)
    mean = grouped.mean(axis=2, keepdims=True)
    variance = grouped.var(axis=2, keepdims=True)
    normalized = ((grouped - mean) / np.sqrt(variance + attributes.get("epsilon", 1e-5))).reshape(x.shape)
    per_channel = (1, -1) + (1,) * (x.ndim - 2)
    y = normalized * gamma.reshape(per_channel) + beta.reshape(per_channel)
    if attributes["activation"]:
        y = y / (1 + np.exp(-y))
    return np.moveaxis(y, 1, -1) if attributes.get("channels_last", 1) else y
