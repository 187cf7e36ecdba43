"""NhwcConv in NumPy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from custom_ops.operator_spec import Array


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """X (N, H, W, C), W (M, kH, kW, C / group), B (M)?, skip as Y? -> Y (N, oH, oW, M) in float64."""
    x, filters = inputs["X"].astype(np.float64), inputs["W"].astype(np.float64)
    stride, dilation, groups = (int(attributes.get(name, 1)) for name in ("stride", "dilation", "group"))
    top, left, bottom, right = (int(attributes.get(f"pad_{side}", 0)) for side in ("top", "left", "bottom", "right"))
    x = np.pad(x, ((0, 0), (top, bottom), (left, right), (0, 0)))
    count, height, width, channels = filters.shape
    rows = (x.shape[1] - (height - 1) * dilation - 1) // stride + 1
    columns = (x.shape[2] - (width - 1) * dilation - 1) // stride + 1
    y = np.zeros((x.shape[0], rows, columns, count))
    for kh in range(height):
        for kw in range(width):
            row, column = kh * dilation, kw * dilation
            seen = x[:, row : row + stride * rows : stride, column : column + stride * columns : stride]
            for group in range(groups):
                part = slice(group * count // groups, (group + 1) * count // groups)
                y[..., part] += seen[..., group * channels : (group + 1) * channels] @ filters[part, kh, kw].T
    return {"Y": y + inputs.get("B", np.zeros(count)).astype(np.float64) + inputs.get("skip", np.zeros(1))}
