"""Params, NumPy reference, test cases and benchmark shape of QuantizeFloat8."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from math import prod

import numpy as np

from custom_ops.operator_spec import (
    DTYPES,
    INT32,
    INT64,
    POINTER,
    QUANTIZED,
    Array,
    Float8Output,
    OperatorCase,
    Shape,
    float8_output,
    struct_fields,
    with_quantized,
)

NAME = "QuantizeFloat8"
INPUTS = ("X",)
OUTPUTS = (QUANTIZED,)


class Params(ctypes.Structure):
    """struct QuantizeFloat8Params of op.h."""

    _fields_ = struct_fields((INT32, "dtype"), (POINTER, "x"), (Float8Output, "quantized"), (INT64, "count"))


def params(case: OperatorCase, dtype: str, address: Mapping[str, int]) -> Params:
    """Return the Params of a case."""
    return Params(DTYPES[dtype][0], address["X"], float8_output(case, address), prod(case.inputs["X"]))


def output_shapes(case: OperatorCase) -> dict[str, Shape]:
    """The output has the shape of X."""
    return {QUANTIZED: case.inputs["X"]}


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """X of any shape -> X / quantized_scale in float8."""
    return {QUANTIZED: with_quantized({"X": inputs["X"].astype(np.float64)}, attributes)[QUANTIZED]}


def _case(*shape: int, scale: float = 0.03125, benchmark: bool = False) -> OperatorCase:
    name = "x".join(map(str, shape)) + f"-{scale}"
    return OperatorCase(name, {"X": shape}, {"quantized_scale": scale}, benchmark=benchmark)


CASES = [
    _case(1),
    _case(3, 37),
    _case(7, 88),
    _case(4, 300, scale=1e-3),  # most elements saturate
    _case(4, 304, scale=64.0),  # subnormal elements
    _case(0, 16),
    _case(2, 4096, 640, benchmark=True),
]
