"""NumPy reference of Bfloat16Conv: the convolution of the rounded numbers, in float64."""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from custom_ops.operator_spec import Array


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """X (N, C, H, W), W (M, C, k, k), B (M) -> Y (N, M, ceil(H / stride), ceil(W / stride)); X or Y channels last."""
    x, w = (inputs[name].astype(ml_dtypes.bfloat16).astype(np.float64) for name in ("X", "W"))
    if attributes.get("x_last", 0):
        x = x.transpose(0, 3, 1, 2)
    edge = w.shape[2]
    frame = (edge // 2, edge // 2)
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(x, ((0, 0), (0, 0), frame, frame)), (edge, edge), (2, 3))
    stride = int(attributes.get("stride", 1))
    windows = windows[:, :, ::stride, ::stride]
    y = np.einsum("nchwij,mcij->nmhw", windows, w, optimize=True)
    if "B" in inputs:
        y += inputs["B"].astype(np.float64)[:, None, None]
    return {"Y": y.transpose(0, 2, 3, 1) if attributes.get("y_last", 0) else y}
