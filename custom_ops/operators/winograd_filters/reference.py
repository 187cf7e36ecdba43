"""NumPy reference of WinogradFilters: filters as F(2 x 2, 3 x 3) multiplies by them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from custom_ops.operator_spec import Array

# Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", arXiv 1509.09308, section 4.1.
G = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """weight (M, 3, 3, C) -> Y (16, M, C), or (9, M, C) of attribute `upsampled`, in float64."""
    weight = inputs["weight"].astype(np.float64)
    g = G[[0, 1, 3]] if attributes.get("upsampled") else G
    y = np.einsum("ai,mijc,bj->abmc", g, weight, g, optimize=True)
    return {"Y": y.reshape(len(g) ** 2, weight.shape[0], weight.shape[3])}
