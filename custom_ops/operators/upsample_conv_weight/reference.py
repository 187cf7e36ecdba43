"""NumPy reference of UpsampleConvWeight: filters of 2x nearest upsampling and a 3 x 3 convolution combined."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from custom_ops.operator_spec import Array


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """weight (M, 3, 3, C) -> Y (C, 4, 4, M) in float64: the full convolution of the turned taps with 2 x 2 ones."""
    turned = inputs["weight"].astype(np.float64)[:, ::-1, ::-1].transpose(3, 1, 2, 0)
    y = np.zeros((turned.shape[0], 4, 4, turned.shape[3]))
    for down, across in np.ndindex(2, 2):
        y[:, down : down + 3, across : across + 3] += turned
    return {"Y": y}
