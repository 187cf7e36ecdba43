"""BiasAdd: the calls that test it and the shapes that time it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from math import prod

from custom_ops.operator_spec import DTYPES, Case, Shape

NAME = "BiasAdd"
INPUTS = ("X", "bias", "skip")
OUTPUTS = ("Y",)
PARAMETERS = ()


class Params(ctypes.Structure):
    """struct BiasAddParams of op.h."""

    _fields_ = (
        ("dtype", ctypes.c_int32),
        ("x", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("skip", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("channels", ctypes.c_int64),
    )


def params(case: Case, dtype: str, address: Mapping[str, int]) -> Params:
    """The call's Params; `address` maps input and output names to device addresses."""
    shape = case.inputs["X"]
    return Params(
        dtype=DTYPES[dtype][0],
        x=address["X"],
        bias=address["bias"],
        skip=address.get("skip", 0),
        y=address["Y"],
        rows=prod(shape[:-1]),
        channels=shape[-1],
    )


def output_shapes(case: Case) -> dict[str, Shape]:
    """Y has the shape of X."""
    return {"Y": case.inputs["X"]}


def _case(n: int, s: int, c: int, values: str = "normal", skip: bool = True, benchmark: bool = False) -> Case:
    shapes: dict[str, Shape] = {"X": (n, s, c), "bias": (c,)}
    if skip:
        shapes["skip"] = (n, s, c)
    name = f"{n}x{s}x{c}-{values}" + ("" if skip else "-no_skip")
    return Case(name, shapes, values=values, benchmark=benchmark)


CASES = [
    _case(1, 1, 1),
    _case(2, 64, 32),
    _case(1, 77, 320),
    _case(3, 13, 97),
    _case(2, 31, 12),
    _case(16, 7, 40),
    _case(2, 9, 40, skip=False),
    _case(1, 5, 33, skip=False),
    _case(2, 64, 64, values="large"),
    _case(2, 64, 64, values="tiny"),
    _case(2, 4096, 320, benchmark=True),
    _case(8, 4096, 320, benchmark=True),
    _case(16, 4096, 320, benchmark=True),
    _case(2, 4096, 640, benchmark=True),
    _case(2, 1024, 1280, benchmark=True),
    _case(2, 16384, 640, skip=False, benchmark=True),
]
