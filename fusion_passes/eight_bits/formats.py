"""The formats of layers in 8 bits, and weights in them: symmetric, with scales that are rounded up."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fusion_passes.element_formats import FLOAT8, INT8, ElementFormat

FORMATS: Mapping[str, ElementFormat] = {each.name: each for each in (FLOAT8, INT8)}


def channel_scale(argument: tuple[str, int | None, float], weight: np.ndarray) -> np.ndarray:
    """Return the quantization scale of a weight, float32: one per output channel (channels,), or one for all ().

    argument: [name of the format, axis of the output channels or null for one scale, factor on the scales].
    """
    name, axis, factor = argument
    others = None if axis is None else tuple(each for each in range(weight.ndim) if each != axis)
    largest = np.abs(weight.astype(np.float32, copy=False)).max(axis=others, initial=0.0)
    return np.asarray(FORMATS[name].scale(largest, round_up=True) * np.float32(factor))


def quantize_weight(argument: tuple[str, int | None], weight: np.ndarray) -> np.ndarray:
    """Return a weight in 8 bits by the scales of `channel_scale`. argument: [name of the format, axis or null]."""
    name, axis = argument
    scale = channel_scale((name, axis, 1.0), weight)
    if axis is not None:
        scale = scale.reshape([-1 if each == axis else 1 for each in range(weight.ndim)])
    return FORMATS[name].quantize(weight.astype(np.float32, copy=False), scale)
