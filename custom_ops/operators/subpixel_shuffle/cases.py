"""SubpixelShuffle: the calls that test it and the shapes that time it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

from custom_ops.operator_spec import DTYPES, Case, Shape

NAME = "SubpixelShuffle"
INPUTS = ("X", "bias")
OUTPUTS = ("Y",)
PARAMETERS = ()


class Params(ctypes.Structure):
    """struct SubpixelShuffleParams of op.h."""

    _fields_ = (
        ("dtype", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("x", "bias", "y")),
        *((name, ctypes.c_int64) for name in ("batch", "height", "width", "channels")),
    )


def params(case: Case, dtype: str, address: Mapping[str, int]) -> Params:
    """The call's Params; `address` maps input and output names to device addresses."""
    pointers = (address.get(name, 0) for name in ("X", "bias", "Y"))
    batch, height, width, channels = case.inputs["X"]
    return Params(DTYPES[dtype][0], *pointers, batch, height - 1, width - 1, channels // 4)


def output_shapes(case: Case) -> dict[str, Shape]:
    """Y (N, 2 H, 2 W, C) of X (N, H + 1, W + 1, 4 C)."""
    batch, height, width, channels = case.inputs["X"]
    return {"Y": (batch, 2 * (height - 1), 2 * (width - 1), channels // 4)}


def _case(n: int, h: int, w: int, c: int, bias: bool = True, values: str = "normal", benchmark: bool = False) -> Case:
    """An image of `h` x `w` that becomes one of twice the size, with `c` channels."""
    inputs: dict[str, Shape] = {"X": (n, h + 1, w + 1, 4 * c)}
    if bias:
        inputs["bias"] = (c,)
    return Case(f"{n}x{h}x{w}x{c}-b{bias:d}-{values}", inputs, values=values, benchmark=benchmark)


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
    _case(1, 8, 6, 32, values="large"),
    _case(1, 8, 6, 32, values="tiny"),
    _case(1, 64, 64, 512, benchmark=True),
    _case(1, 128, 128, 512, benchmark=True),
    _case(1, 256, 256, 256, benchmark=True),
    _case(2, 32, 32, 640, benchmark=True),
    _case(2, 16, 16, 1280, benchmark=True),
    _case(2, 8, 8, 1280, benchmark=True),
]
