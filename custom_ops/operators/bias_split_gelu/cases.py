"""BiasSplitGelu: the calls that test it and the shapes that time it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from math import prod

from custom_ops.operator_spec import DTYPES, Case, Shape

NAME = "BiasSplitGelu"
INPUTS = ("X", "bias")
OUTPUTS = ("Y",)
PARAMETERS = ()


class Params(ctypes.Structure):
    """struct BiasSplitGeluParams of op.h."""

    _fields_ = (
        ("dtype", ctypes.c_int32),
        ("x", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("half", ctypes.c_int64),
    )


def params(case: Case, dtype: str, address: Mapping[str, int]) -> Params:
    """The call's Params; `address` maps input and output names to device addresses."""
    shape = case.inputs["X"]
    return Params(
        dtype=DTYPES[dtype][0],
        x=address["X"],
        bias=address["bias"],
        y=address["Y"],
        rows=prod(shape[:-1]),
        half=shape[-1] // 2,
    )


def output_shapes(case: Case) -> dict[str, Shape]:
    """Y has half of X's last axis."""
    shape = case.inputs["X"]
    return {"Y": (*shape[:-1], shape[-1] // 2)}


def _case(
    n: int,
    s: int,
    d: int,
    values: str = "normal",
    benchmark: bool = False,
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16"),
) -> Case:
    inputs = {"X": (n, s, d), "bias": (d,)}
    name = f"{n}x{s}x{d}-{values}"
    # the error function is good to 1.5e-7, 2.5 roundoffs of 1
    return Case(name, inputs, values=values, benchmark=benchmark, dtypes=dtypes, float32_roundoffs=8)


CASES = [
    _case(1, 1, 2),
    _case(2, 64, 64),
    _case(1, 77, 2560),
    _case(3, 13, 194),
    _case(2, 31, 24),
    _case(16, 7, 40),
    # left * right must fit: not so in float16
    _case(2, 16, 64, values="tiny", dtypes=("float32", "bfloat16")),
    _case(2, 16, 64, values="large", dtypes=("float32", "bfloat16")),
    _case(2, 4096, 2560, benchmark=True),
    _case(8, 4096, 2560, benchmark=True),
    _case(2, 1024, 5120, benchmark=True),
    _case(8, 1024, 5120, benchmark=True),
    _case(2, 256, 10240, benchmark=True),
    _case(2, 4096, 5120, benchmark=True),
    _case(2, 1024, 10240, benchmark=True),
]
