"""Bfloat16MatMul: the calls that test it. It has no GPU kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from math import prod

import numpy as np

from custom_ops.operator_spec import DTYPES, Array, Case, Shape

NAME = "Bfloat16MatMul"
INPUTS = ("X", "W", "bias")
OUTPUTS = ("Y",)
PARAMETERS = ("bias",)


class Params(ctypes.Structure):
    """struct Bfloat16MatMulParams of op.h."""

    _fields_ = (
        ("dtype", ctypes.c_int32),
        ("weight_dtype", ctypes.c_int32),
        ("y_dtype", ctypes.c_int32),
        ("gated", ctypes.c_int32),
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("kept", ctypes.c_void_p),
        ("packed", ctypes.c_void_p),
    )


def params(case: Case, dtype: str, address: Mapping[str, int]) -> Params:
    """The call's Params; `address` maps input and output names to addresses."""
    number, gated = DTYPES[dtype][0], int(case.attributes.get("gated", 0))
    pointers = (address["X"], address["W"], address.get("bias", 0), address["Y"])
    return Params(number, number, number, gated, *pointers, prod(case.inputs["X"][:-1]), *case.inputs["W"])


def output_shapes(case: Case) -> dict[str, Shape]:
    """Y has the shape of X, its last axis W's, or half of it where gated."""
    return {"Y": (*case.inputs["X"][:-1], case.inputs["W"][1] // (1 + int(case.attributes.get("gated", 0))))}


def draw(case: Case, name: str, rng: np.random.Generator) -> Array | None:
    """Weights that keep the magnitude of their input."""
    shape = case.inputs[name]
    return rng.standard_normal(shape) / np.sqrt(max(1, *shape[:1])) if name == "W" else None


def _case(*shape: int, n: int, bias: bool = True, gated: bool = False, values: str = "normal") -> Case:
    """X of `shape`, `n` columns."""
    inputs: dict[str, Shape] = {"X": shape, "W": (shape[-1], n), **({"bias": (n,)} if bias else {})}
    name = "x".join(map(str, shape)) + f"-n{n}-b{bias:d}-{values}" + "-gated" * gated
    attributes: dict[str, int | float] = {"gated": 1} if gated else {}
    return Case(
        name, inputs, attributes, values=values, dtypes=("float32", "bfloat16"), float32_roundoffs=8 + shape[-1] ** 0.5
    )


# Sizes that no tile, block or vector divides; more rows than a task has, more columns than rows.
CASES = [
    _case(1, 1, n=1),
    _case(5, 7, n=3),
    _case(2, 3, 16, n=40),
    _case(2, 9, 33, n=17, bias=False),
    _case(3, 4, 5, 64, n=32, bias=False),
    _case(600, 40, n=33),
    _case(3, 70, n=700),
    _case(0, 4, 8, n=8),
    _case(2, 64, 64, n=64, values="large"),
    _case(3, 24, n=2, gated=True),
    _case(70, 40, n=88, gated=True),
    _case(2, 40, 64, n=64, bias=False, gated=True),
]
