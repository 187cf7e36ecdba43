"""NhwcWinograd in NumPy, float64."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from custom_ops.operator_spec import Array

# Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", arXiv 1509.09308, section 4.1.
B = np.array([[1, 0, 0, 0], [0, 1, -1, 1], [-1, 1, 1, 0], [0, 0, 0, -1]])
A = np.array([[1, 0], [1, 1], [1, -1], [0, -1]])


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """X (N, H, W, C), W (16, M, C) of WinogradFilters, B (M), skip -> Y (N, H, W, M).

    With attribute `upsampled`, X is repeated down and across first, and W is (9, M, C).
    """
    x, filters = (inputs[name].astype(np.float64) for name in ("X", "W"))
    rows_used = [0, 1, 2, 3]
    if attributes.get("upsampled"):
        x, rows_used = x.repeat(2, axis=1).repeat(2, axis=2), [0, 1, 3]
    b, a, side = B[:, rows_used], A[rows_used], len(rows_used)
    n, h, w, c = x.shape
    rows, columns = (h + 1) // 2, (w + 1) // 2
    padded = np.pad(x, ((0, 0), (1, 2 * rows - h + 1), (1, 2 * columns - w + 1), (0, 0)))
    tiles = np.lib.stride_tricks.sliding_window_view(padded, (4, 4), axis=(1, 2))[:, ::2, ::2]
    transformed = np.einsum("ia,nrscij,jb->nrsabc", b, tiles, b, optimize=True)
    products = np.einsum(
        "nrsabc,abmc->nrsabm", transformed, filters.reshape(side, side, filters.shape[1], c), optimize=True
    )
    tiles = np.einsum("ai,nrsabm,bj->nrisjm", a, products, a, optimize=True)
    y = tiles.reshape(n, 2 * rows, 2 * columns, filters.shape[1])[:, :h, :w]
    for name in ("B", "skip"):
        y = y + inputs[name].astype(np.float64) if name in inputs else y
    return {"Y": y}
