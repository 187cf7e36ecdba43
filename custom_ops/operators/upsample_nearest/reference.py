"""NumPy reference of UpsampleNearest: each pixel repeated down and across."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from custom_ops.operator_spec import Array


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """X (N, H, W, C) -> Y (N, H * scale_height, W * scale_width, C) in float64."""
    x = inputs["X"].astype(np.float64)
    taller = np.repeat(x, int(attributes["scale_height"]), axis=1)
    return {"Y": np.repeat(taller, int(attributes["scale_width"]), axis=2)}
