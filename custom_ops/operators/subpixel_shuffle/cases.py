"""Params, NumPy reference, test cases and benchmark shapes of SubpixelShuffle."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np

from custom_ops.operator_spec import DTYPES, INT32, INT64, POINTER, Array, OperatorCase, Shape, struct_fields

NAME = "SubpixelShuffle"
INPUTS = ("X", "bias")
OUTPUTS = ("Y",)


class Params(ctypes.Structure):
    """struct SubpixelShuffleParams of op.h."""

    _fields_ = struct_fields((INT32, "dtype"), (POINTER, "x bias y"), (INT64, "batch height width channels"))


def params(case: OperatorCase, dtype: str, address: Mapping[str, int]) -> Params:
    """Return the Params of a case."""
    pointers = (address.get(name, 0) for name in ("X", "bias", "Y"))
    batch, height, width, channels = case.inputs["X"]
    return Params(DTYPES[dtype][0], *pointers, batch, height - 1, width - 1, channels // 4)


def output_shapes(case: OperatorCase) -> dict[str, Shape]:
    """Y (N, 2 H, 2 W, C) of X (N, H + 1, W + 1, 4 C)."""
    batch, height, width, channels = case.inputs["X"]
    return {"Y": (batch, 2 * (height - 1), 2 * (width - 1), channels // 4)}


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """X (N, H + 1, W + 1, 4 C), bias (C) -> Y (N, 2 H, 2 W, C) in float64."""
    x = inputs["X"].astype(np.float64)
    batch, height, width, channels = (size - excess for size, excess in zip(x.shape, (0, 1, 1, 0), strict=True))
    phases = x.reshape(batch, height + 1, width + 1, 2, 2, channels // 4)
    y = np.empty((batch, height, 2, width, 2, channels // 4))
    for p, q in np.ndindex(2, 2):
        y[:, :, p, :, q] = phases[:, p : p + height, q : q + width, p, q]
    y = y.reshape(batch, 2 * height, 2 * width, channels // 4)
    return {"Y": y + inputs["bias"].astype(np.float64) if "bias" in inputs else y}


def _case(
    n: int, h: int, w: int, c: int, bias: bool = True, distribution: str = "normal", benchmark: bool = False
) -> OperatorCase:
    """An image of `h` x `w` that becomes one of twice the size, with `c` channels."""
    inputs: dict[str, Shape] = {"X": (n, h + 1, w + 1, 4 * c)}
    if bias:
        inputs["bias"] = (c,)
    return OperatorCase(
        f"{n}x{h}x{w}x{c}-b{bias:d}-{distribution}", inputs, distribution=distribution, benchmark=benchmark
    )


CASES = [
    _case(1, 1, 1, 1),
    _case(2, 8, 8, 64),
    _case(1, 5, 7, 33, bias=False),
    _case(2, 4, 3, 6),
    _case(1, 6, 5, 12, bias=False),
    _case(3, 3, 11, 1),
    _case(2, 5, 4, 40, bias=False),
    _case(0, 4, 4, 8),
    _case(2, 0, 4, 8),
    _case(1, 8, 6, 32, distribution="large"),
    _case(1, 8, 6, 32, distribution="tiny"),
    _case(1, 64, 64, 512, benchmark=True),
    _case(1, 128, 128, 512, benchmark=True),
    _case(1, 256, 256, 256, benchmark=True),
    _case(2, 32, 32, 640, benchmark=True),
    _case(2, 16, 16, 1280, benchmark=True),
    _case(2, 8, 8, 1280, benchmark=True),
]
