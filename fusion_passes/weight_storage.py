"""Weights stored in 4 or 8 bits, which DequantizeLinear reads: elements, scales and zero points.

A scale belongs to a block of consecutive elements along one axis (the rows of a matrix product), or to an output
channel. value = scale * (element - zero point); float8 and symmetric integers have no zero point. Scales are float16
numbers, so a graph in half precision has the same ones as a graph in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

# Name -> symmetric elements: dtype and largest element; None for asymmetric ones of float8.
SYMMETRIC: Mapping[str, tuple[np.dtype, float]] = {
    "int8": (np.dtype(np.int8), 127.0), "int4": (np.dtype(ml_dtypes.int4), 7.0),
    "float8": (np.dtype(ml_dtypes.float8_e4m3fn), 448.0),
}  # fmt: skip
ASYMMETRIC: Mapping[str, tuple[np.dtype, float]] = {
    "int8": (np.dtype(np.uint8), 255.0), "int4": (np.dtype(ml_dtypes.uint4), 15.0),
}  # fmt: skip
SMALLEST_SCALE = np.float32(2.0**-24)  # of float16

# [name, axis, block, symmetric]. block: elements of a scale along `axis`; 0 for one scale an index of `axis`.
Argument = tuple[str, int, int, bool]


def element_dtype(argument: Argument) -> np.dtype:
    """Return the dtype of the elements and zero points."""
    name, _, _, symmetric = argument
    return (SYMMETRIC if symmetric else ASYMMETRIC)[name][0]


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
    name, _, _, symmetric = argument
    low, high = _extremes(argument, weight.astype(np.float32, copy=False))
    if symmetric:
        exact = np.maximum(-low, high) / np.float32(SYMMETRIC[name][1])
    else:
        exact = (np.maximum(high, 0) - np.minimum(low, 0)) / np.float32(ASYMMETRIC[name][1])
    if not (exact <= float(np.finfo(np.float16).max)).all():
        raise ValueError(f"a magnitude of {float(np.abs(weight).max()):g} is too large to store in {name}")
    rounded = exact.astype(np.float16).astype(np.float32)
    return np.where(exact > 0, np.maximum(rounded, SMALLEST_SCALE), np.float32(1))


def zero_points(argument: Argument, weight: np.ndarray) -> np.ndarray:
    """Return the zero point of each block or channel of asymmetric elements."""
    dtype, largest = ASYMMETRIC[argument[0]]
    low, _ = _extremes(argument, weight.astype(np.float32, copy=False))
    return np.rint(-np.minimum(low, 0) / scales(argument, weight)).clip(0, largest).astype(dtype)


def elements(argument: Argument, weight: np.ndarray) -> np.ndarray:
    """Return the elements of a weight, rounded to nearest even and saturated."""
    name, axis, block, symmetric = argument
    values = weight.astype(np.float32, copy=False)

    def expand(each: np.ndarray) -> np.ndarray:
        if block:
            return np.repeat(each, block, axis)
        return each.reshape([-1 if i == axis else 1 for i in range(values.ndim)])

    scaled = values / expand(scales(argument, weight))
    if not symmetric:
        dtype, largest = ASYMMETRIC[name]
        zero = expand(zero_points(argument, weight).astype(np.float32))
        return (np.rint(scaled) + zero).clip(0, largest).astype(dtype)
    dtype, largest = SYMMETRIC[name]
    clipped = scaled.clip(-largest, largest)
    return ((clipped if name == "float8" else np.rint(clipped)) + np.float32(0)).astype(dtype)  # no -0


# Operations of weight recipes.
OPERATIONS: Mapping[str, Callable[[Any, np.ndarray], np.ndarray]] = {
    "stored_elements": elements, "stored_scales": scales, "stored_zero_points": zero_points,
}  # fmt: skip
