"""RotaryEmbedding in NumPy, float64."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from custom_ops.operator_spec import Array


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """X (B, S, N * D), position_ids (1), cos and sin (L, D / 2) -> Y, as X."""
    x, first = inputs["X"].astype(np.float64), int(inputs["position_ids"][0])
    batch, length, width = x.shape
    cos, sin = (inputs[name][first : first + length, None].astype(np.float64) for name in ("cos", "sin"))
    heads = (batch, length, int(attributes["num_heads"]))
    order = (-1, 2) if attributes["interleaved"] else (2, -1)
    pairs = x.reshape(*heads, *order) if width else x.reshape(*heads, 0, 2)
    a, b = np.moveaxis(pairs, -1 if attributes["interleaved"] else -2, 0)
    turned = np.stack([a * cos - b * sin, a * sin + b * cos], -1 if attributes["interleaved"] else -2)
    return {"Y": turned.reshape(x.shape)}
