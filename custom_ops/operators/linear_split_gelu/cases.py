"""LinearSplitGelu: the calls that test it and the GEGLU layers of Stable Diffusion that time it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from math import prod

from custom_ops.operator_spec import DTYPES, Case, Shape
from custom_ops.operators.linear_add import cases as linear_add

NAME = "LinearSplitGelu"
INPUTS = ("X", "W", "bias")
OUTPUTS = ("Y",)
PARAMETERS = ()

draw = linear_add.draw


class Params(ctypes.Structure):
    """struct LinearSplitGeluParams of op.h."""

    _fields_ = (
        ("dtype", ctypes.c_int32),
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("half", ctypes.c_int64),
    )


def params(case: Case, dtype: str, address: Mapping[str, int]) -> Params:
    """The call's Params; `address` maps input and output names to device addresses."""
    shape, (inner, columns) = case.inputs["X"], case.inputs["W"]
    places = (address[name] for name in ("X", "W", "bias", "Y"))
    return Params(DTYPES[dtype][0], *places, prod(shape[:-1]), inner, columns // 2)


def output_shapes(case: Case) -> dict[str, Shape]:
    """Y has the shape of X, its last axis half of W's."""
    return {"Y": (*case.inputs["X"][:-1], case.inputs["W"][1] // 2)}


def _case(*shape: int, half: int, big: bool = False) -> Case:
    """X of `shape`, `half` columns of Y."""
    inputs: dict[str, Shape] = {"X": shape, "W": (shape[-1], 2 * half), "bias": (2 * half,)}
    name = "x".join(map(str, shape)) + f"-h{half}"
    # Sums of K products: their errors add up as sqrt(K).
    return Case(name, inputs, benchmark=big, float32_roundoffs=8 + shape[-1] ** 0.5)


CASES = [
    _case(1, 1, half=1),
    _case(5, 7, half=3),
    _case(0, 4, 8, half=8),
    _case(2, 3, 16, half=40),
    _case(2, 20, 200, half=72),
    _case(150, 296, half=712),  # the warpgroup kernel: ragged tiles in every direction, several a block
    _case(2048, 1280, half=5120, big=True),
    _case(8192, 640, half=2560, big=True),
    _case(8192, 320, half=1280, big=True),
    _case(2048, 640, half=2560, big=True),
    _case(512, 1280, half=5120, big=True),
]
