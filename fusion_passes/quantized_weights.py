"""Weights in 4 or 8 bits: elements, scales and zero points, and the operations of weight recipes that compute them.

A scale belongs to an output channel, to a block of consecutive elements along one axis (the rows of a matrix product),
or to the weight. value = scale * (element - zero point); float8 and symmetric integers have no zero point.

Layers in 8 bits (`optimize --float8`) round their scales to float16 up, so that no element saturates; stored weights
(`--weights`) round them to nearest. Folders record which by the operation, so both stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fusion_passes.element_formats import FLOAT8, INT4, INT8, UINT4, UINT8, ElementFormat

FORMATS: Mapping[str, ElementFormat] = {each.name: each for each in (FLOAT8, INT8)}  # of layers in 8 bits
SYMMETRIC: Mapping[str, ElementFormat] = {each.name: each for each in (INT8, INT4, FLOAT8)}
ASYMMETRIC: Mapping[str, ElementFormat] = {each.name: each for each in (UINT8, UINT4)}


@dataclass(frozen=True)
class WeightQuantization:
    """Parameters of a weight's quantization.

    axis: of the output channels or, with `block` elements of a scale, along which blocks lie; None for one scale.
    """

    format: ElementFormat
    axis: int | None
    block: int = 0
    round_up: bool = False

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of scales and zero points of a weight of `shape`."""
        if self.block:
            return tuple(size // self.block if i == self.axis else size for i, size in enumerate(shape))
        return () if self.axis is None else (shape[self.axis],)

    def scales(self, weight: np.ndarray) -> np.ndarray:
        """Return the scales, float32. Raises ValueError for one that float16 does not represent."""
        low, high = self._extremes(weight)
        has_zero_point = self.format.has_zero_point
        span = np.maximum(high, 0) - np.minimum(low, 0) if has_zero_point else np.maximum(-low, high)
        return np.asarray(self.format.scale(span, self.round_up))

    def zero_points(self, weight: np.ndarray) -> np.ndarray:
        """Return the zero points of asymmetric elements."""
        return self.format.quantize(-np.minimum(self._extremes(weight)[0], 0), self.scales(weight))

    def elements(self, weight: np.ndarray) -> np.ndarray:
        """Return the elements of a weight, rounded to nearest even and saturated."""
        weight = weight.astype(np.float32, copy=False)

        def expand(each: np.ndarray) -> np.ndarray:
            if self.block:
                return np.repeat(each, self.block, self.axis)
            return (
                each if self.axis is None else each.reshape([-1 if i == self.axis else 1 for i in range(weight.ndim)])
            )

        zero = expand(self.zero_points(weight).astype(np.float32)) if self.format.has_zero_point else 0
        return self.format.quantize(weight, expand(self.scales(weight)), zero)

    def _extremes(self, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the smallest and largest value for each scale."""
        weight = weight.astype(np.float32, copy=False)
        if self.block and self.axis is not None:
            weight = weight.reshape(*weight.shape[: self.axis], -1, self.block, *weight.shape[self.axis + 1 :])
            return weight.min(self.axis + 1), weight.max(self.axis + 1)
        others = tuple(i for i in range(weight.ndim) if i != self.axis)
        return weight.min(others), weight.max(others)


# [name of the format, axis, block, symmetric]: the argument of the operations of stored weights.
StoredArgument = tuple[str, int, int, bool]


def stored(argument: StoredArgument) -> WeightQuantization:
    name, axis, block, symmetric = argument
    return WeightQuantization((SYMMETRIC if symmetric else ASYMMETRIC)[name], axis, block)


def _layer(argument: Any) -> WeightQuantization:
    """Return the quantization of a layer's weight. argument: [name of the format, axis or null, ...]."""
    return WeightQuantization(FORMATS[argument[0]], argument[1], round_up=True)


# Operations of weight recipes. The third item of channel_scale's argument is a factor on the scales.
OPERATIONS: Mapping[str, Callable[[Any, np.ndarray], np.ndarray]] = {
    "stored_elements": lambda argument, weight: stored(argument).elements(weight),
    "stored_scales": lambda argument, weight: stored(argument).scales(weight),
    "stored_zero_points": lambda argument, weight: stored(argument).zero_points(weight),
    "quantize": lambda argument, weight: _layer(argument).elements(weight),
    "channel_scale": lambda argument, weight: np.asarray(_layer(argument).scales(weight) * np.float32(argument[2])),
}
