"""Weights stored in 4 or 8 bits, which DequantizeLinear reads: elements, scales and zero points.

A scale belongs to a block of consecutive elements along one axis (the rows of a matrix product), or to an output
channel. value = scale * (element - zero point); float8 and symmetric integers have no zero point. Scales are float16
numbers, so a graph in half precision has the same ones as a graph in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fusion_passes.element_formats import FLOAT8, INT4, INT8, UINT4, UINT8, ElementFormat

SYMMETRIC: Mapping[str, ElementFormat] = {each.name: each for each in (INT8, INT4, FLOAT8)}
ASYMMETRIC: Mapping[str, ElementFormat] = {each.name: each for each in (UINT8, UINT4)}

# [name, axis, block, symmetric]. block: elements of a scale along `axis`; 0 for one scale an index of `axis`.
Argument = tuple[str, int, int, bool]


def element_format(argument: Argument) -> ElementFormat:
    """Return the format of the elements; zero points have its dtype."""
    name, _, _, symmetric = argument
    return (SYMMETRIC if symmetric else ASYMMETRIC)[name]


def scale_shape(argument: Argument, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of scales and zero points of a weight of `shape`."""
    _, axis, block, _ = argument
    return tuple(n // block if i == axis else n for i, n in enumerate(shape)) if block else (shape[axis],)


def _extremes(argument: Argument, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the smallest and largest value of each block or channel."""
    _, axis, block, _ = argument
    if block:
        blocks = weight.reshape(*weight.shape[:axis], -1, block, *weight.shape[axis + 1 :])
        return blocks.min(axis + 1), blocks.max(axis + 1)
    others = tuple(i for i in range(weight.ndim) if i != axis)
    return weight.min(others), weight.max(others)


def scales(argument: Argument, weight: np.ndarray) -> np.ndarray:
    """Return the scale of each block or channel, float32. Raises ValueError for one that float16 does not represent."""
    low, high = _extremes(argument, weight.astype(np.float32, copy=False))
    format_ = element_format(argument)
    return format_.scale(np.maximum(high, 0) - np.minimum(low, 0) if format_.has_zero_point else np.maximum(-low, high))


def zero_points(argument: Argument, weight: np.ndarray) -> np.ndarray:
    """Return the zero point of each block or channel of asymmetric elements."""
    low, _ = _extremes(argument, weight.astype(np.float32, copy=False))
    return element_format(argument).quantize(-np.minimum(low, 0), scales(argument, weight))


def elements(argument: Argument, weight: np.ndarray) -> np.ndarray:
    """Return the elements of a weight, rounded to nearest even and saturated."""
    _, axis, block, _ = argument
    values = weight.astype(np.float32, copy=False)

    def expand(each: np.ndarray) -> np.ndarray:
        if block:
            return np.repeat(each, block, axis)
        return each.reshape([-1 if i == axis else 1 for i in range(values.ndim)])

    format_ = element_format(argument)
    zero = expand(zero_points(argument, weight).astype(np.float32)) if format_.has_zero_point else 0
    return format_.quantize(values, expand(scales(argument, weight)), zero)


# Operations of weight recipes.
OPERATIONS: Mapping[str, Callable[[Any, np.ndarray], np.ndarray]] = {
    "stored_elements": elements, "stored_scales": scales, "stored_zero_points": zero_points,
}  # fmt: skip
