"""LinearSplitGelu: the calls that test it and the shapes that time it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from math import prod

import numpy as np

from custom_ops.op import DTYPES, Array, Case, Shape

NAME = "LinearSplitGelu"
INPUTS = ("X", "W", "bias")
OUTPUTS = ("Y",)
PARAMETERS = ()


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
    return Params(
        dtype=DTYPES[dtype][0],
        x=address["X"],
        weight=address["W"],
        bias=address["bias"],
        y=address["Y"],
        rows=prod(shape[:-1]),
        inner=inner,
        half=columns // 2,
    )


def output_shapes(case: Case) -> dict[str, Shape]:
    """Y has the shape of X, its last axis half of W's."""
    return {"Y": (*case.inputs["X"][:-1], case.inputs["W"][1] // 2)}


def draw(case: Case, name: str, rng: np.random.Generator) -> Array | None:
    """Weights that keep the magnitude of their input; of damaged shapes, too."""
    shape = case.inputs[name]
    return rng.standard_normal(shape) / np.sqrt(max((*shape, 1)[0], 1)) if name == "W" else None


def _case(*shape: int, half: int, benchmark: bool = False) -> Case:
    """X of `shape`, W of twice `half` columns."""
    inputs: dict[str, Shape] = {"X": shape, "W": (shape[-1], 2 * half), "bias": (2 * half,)}
    # Sums of K products, whose errors add up as sqrt(K), and the error function.
    roundoffs = 8 + shape[-1] ** 0.5
    return Case("x".join(map(str, (*shape, half))), inputs, benchmark=benchmark, float32_roundoffs=roundoffs)


CASES = [
    _case(1, 1, half=1),
    _case(5, 7, half=3),
    _case(2, 3, 16, half=40),
    _case(2, 9, 33, half=17),
    _case(0, 4, 8, half=8),
    _case(2, 13, 64, half=64),
    _case(300, 8, half=16),
    _case(8192, 320, half=1280, benchmark=True),
    _case(2048, 640, half=2560, benchmark=True),
    _case(512, 1280, half=5120, benchmark=True),
    _case(8192, 640, half=2560, benchmark=True),
    _case(2048, 1280, half=5120, benchmark=True),
]
