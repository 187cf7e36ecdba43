"""NumPy float64 reference of WinogradConv: the convolution as its definition says."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from custom_ops.operator_spec import Array


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """X (N, C, H, W), W (M, C, 3, 3), B (M) -> Y (N, M, H, W)."""
    x, w, b = (inputs[name].astype(np.float64) for name in ("X", "W", "B"))
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    return {"Y": np.einsum("nchwij,mcij->nmhw", windows, w, optimize=True) + b[:, None, None]}
