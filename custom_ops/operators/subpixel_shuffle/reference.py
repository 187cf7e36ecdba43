"""NumPy reference of SubpixelShuffle: four phases put between each other, and a bias added."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from custom_ops.operator_spec import Array


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """X (N, H + 1, W + 1, 4 C), bias (C) -> Y (N, 2 H, 2 W, C) in float64."""
    x = inputs["X"].astype(np.float64)
    batch, height, width, channels = (size - excess for size, excess in zip(x.shape, (0, 1, 1, 0), strict=True))
    phases = x.reshape(batch, height + 1, width + 1, 2, 2, channels // 4)
    y = np.empty((batch, height, 2, width, 2, channels // 4))
    for p, q in np.ndindex(2, 2):
        y[:, :, p, :, q] = phases[:, p : p + height, q : q + width, p, q]
    y = y.reshape(batch, 2 * height, 2 * width, channels // 4)
    return {"Y": y + inputs["bias"].astype(np.float64) if "bias" in inputs else y}
