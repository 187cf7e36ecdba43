"""Params, NumPy reference, test cases and benchmark shapes of BiasAdd."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from math import prod

import numpy as np

from custom_ops.operator_spec import DTYPES, INT32, INT64, POINTER, Array, OperatorCase, Shape, struct_fields

NAME = "BiasAdd"
INPUTS = ("X", "bias", "skip")
OUTPUTS = ("Y",)


class Params(ctypes.Structure):
    """struct BiasAddParams of op.h."""

    _fields_ = struct_fields((INT32, "dtype"), (POINTER, "x bias skip y"), (INT64, "rows channels"))


def params(case: OperatorCase, dtype: str, address: Mapping[str, int]) -> Params:
    """Return the Params of a case."""
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


def output_shapes(case: OperatorCase) -> dict[str, Shape]:
    """Y has the shape of X."""
    return {"Y": case.inputs["X"]}


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """X (N, S, C), bias (C), skip (N, S, C) -> Y (N, S, C) in float64."""
    y = inputs["X"].astype(np.float64) + inputs["bias"].astype(np.float64)
    return {"Y": y + inputs["skip"].astype(np.float64) if "skip" in inputs else y}


def _case(
    n: int, s: int, c: int, distribution: str = "normal", skip: bool = True, benchmark: bool = False
) -> OperatorCase:
    shapes: dict[str, Shape] = {"X": (n, s, c), "bias": (c,)}
    if skip:
        shapes["skip"] = (n, s, c)
    name = f"{n}x{s}x{c}-{distribution}" + ("" if skip else "-no_skip")
    return OperatorCase(name, shapes, distribution=distribution, benchmark=benchmark)


CASES = [
    _case(1, 1, 1),
    _case(2, 64, 32),
    _case(1, 77, 320),
    _case(3, 13, 97),
    _case(2, 31, 12),
    _case(16, 7, 40),
    _case(2, 9, 40, skip=False),
    _case(1, 5, 33, skip=False),
    _case(2, 64, 64, distribution="large"),
    _case(2, 64, 64, distribution="tiny"),
    _case(2, 4096, 320, benchmark=True),
    _case(8, 4096, 320, benchmark=True),
    _case(16, 4096, 320, benchmark=True),
    _case(2, 4096, 640, benchmark=True),
    _case(2, 1024, 1280, benchmark=True),
    _case(2, 16384, 640, skip=False, benchmark=True),
]
