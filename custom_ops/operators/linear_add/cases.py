"""LinearAdd: the calls that test it and the products of Stable Diffusion that time it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from math import prod

import numpy as np

from custom_ops.operator_spec import DTYPES, Array, Case, Shape

NAME = "LinearAdd"
INPUTS = ("X", "W", "bias", "skip")
OUTPUTS = ("Y",)
PARAMETERS = ()


class Params(ctypes.Structure):
    """struct LinearAddParams of op.h."""

    _fields_ = (
        ("dtype", ctypes.c_int32),
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("skip", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("columns", ctypes.c_int64),
    )


def params(case: Case, dtype: str, address: Mapping[str, int]) -> Params:
    """The call's Params; `address` maps input and output names to device addresses."""
    shape, (inner, columns) = case.inputs["X"], case.inputs["W"]
    return Params(
        dtype=DTYPES[dtype][0],
        x=address["X"],
        weight=address["W"],
        bias=address.get("bias", 0),
        skip=address.get("skip", 0),
        y=address["Y"],
        rows=prod(shape[:-1]),
        inner=inner,
        columns=columns,
    )


def output_shapes(case: Case) -> dict[str, Shape]:
    """Y has the shape of X, its last axis W's."""
    return {"Y": (*case.inputs["X"][:-1], case.inputs["W"][1])}


def draw(case: Case, name: str, rng: np.random.Generator) -> Array | None:
    """Weights that keep the magnitude of their input; of damaged shapes, too."""
    shape = case.inputs[name]
    return rng.standard_normal(shape) / np.sqrt(max((*shape, 1)[0], 1)) if name == "W" else None


def _case(*shape: int, n: int, bias: bool = True, skip: bool = True, values: str = "normal", big: bool = False) -> Case:
    """X of `shape`, `n` columns."""
    inputs: dict[str, Shape] = {"X": shape, "W": (shape[-1], n)}
    if bias:
        inputs["bias"] = (n,)
    if skip:
        inputs["skip"] = (*shape[:-1], n)
    name = "x".join(map(str, shape)) + f"-n{n}-b{bias:d}-s{skip:d}-{values}"
    # Sums of K products: their errors add up as sqrt(K).
    return Case(name, inputs, values=values, benchmark=big, float32_roundoffs=4 + shape[-1] ** 0.5)


CASES = [
    _case(1, 1, n=1),
    _case(5, 7, n=3),
    _case(2, 3, 16, n=40),
    _case(2, 9, 33, n=17, bias=False),
    _case(3, 4, 5, 24, n=8, skip=False),
    _case(2, 6, 8, n=24, bias=False, skip=False),
    _case(0, 4, 8, n=8),
    _case(2, 64, 64, n=64, values="large"),
    _case(2, 64, 64, n=64, values="tiny"),
    _case(2, 13, 320, n=64),
    _case(8192, 320, n=320, big=True),
    _case(8192, 320, n=960, bias=False, skip=False, big=True),
    _case(8192, 320, n=2560, bias=False, skip=False, big=True),
    _case(8192, 1280, n=320, big=True),
    _case(2048, 2560, n=640, big=True),
    _case(512, 5120, n=1280, big=True),
]
