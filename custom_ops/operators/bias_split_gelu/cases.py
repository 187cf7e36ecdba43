"""Params, NumPy reference, test cases and benchmark shapes of BiasSplitGelu."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from math import erf, prod, sqrt

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

NAME = "BiasSplitGelu"
INPUTS = ("X", "bias")
OUTPUTS = ("Y", QUANTIZED)


class Params(ctypes.Structure):
    """struct BiasSplitGeluParams of op.h."""

    _fields_ = struct_fields((INT32, "dtype"), (POINTER, "x bias y"), (INT64, "rows half"), (Float8Output, "quantized"))


def params(case: OperatorCase, dtype: str, address: Mapping[str, int]) -> Params:
    """Return the Params of a case."""
    shape = case.inputs["X"]
    return Params(
        dtype=DTYPES[dtype][0],
        x=address["X"],
        bias=address["bias"],
        y=address.get("Y"),
        rows=prod(shape[:-1]),
        half=shape[-1] // 2,
        quantized=float8_output(case, address),
    )


def output_shapes(case: OperatorCase) -> dict[str, Shape]:
    """Both outputs have half of X's last axis."""
    shape = case.inputs["X"]
    return dict.fromkeys(case.outputs or ("Y",), (*shape[:-1], shape[-1] // 2))


_erf = np.vectorize(erf, otypes=[np.float64])


def gelu_gate(left: Array, right: Array) -> Array:
    """left * gelu(right)."""
    return left * 0.5 * right * (1 + _erf(right / sqrt(2)))


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """X (N, S, D), bias (D) -> Y (N, S, D / 2) = left * gelu(right)."""
    left, right = np.split(inputs["X"].astype(np.float64) + inputs["bias"].astype(np.float64), 2, axis=-1)
    return with_quantized({"Y": gelu_gate(left, right)}, attributes)


def _case(
    n: int,
    s: int,
    d: int,
    distribution: str = "normal",
    benchmark: bool = False,
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16"),
    quantized: tuple[str, ...] = (),
) -> OperatorCase:
    """`quantized`: the outputs, one of them in float8."""
    inputs = {"X": (n, s, d), "bias": (d,)}
    name = f"{n}x{s}x{d}-{distribution}"
    # the error function is good to 1.5e-7, 2.5 roundoffs of 1
    attributes: dict[str, int | float] = {}
    if quantized:
        attributes["quantized_scale"] = 0.03125
        name += "-" + "-".join(quantized)
    return OperatorCase(
        name,
        inputs,
        attributes,
        quantized or None,
        distribution,
        benchmark=benchmark,
        dtypes=dtypes,
        float32_roundoffs=8,
    )


CASES = [
    _case(1, 1, 2),
    _case(2, 64, 64),
    _case(1, 77, 2560),
    _case(3, 13, 194),
    _case(2, 31, 24),
    _case(16, 7, 40),
    _case(2, 31, 64, quantized=(QUANTIZED,)),
    _case(3, 13, 194, quantized=("Y", QUANTIZED)),
    # left * right must fit: not so in float16
    _case(2, 16, 64, distribution="tiny", dtypes=("float32", "bfloat16")),
    _case(2, 16, 64, distribution="large", dtypes=("float32", "bfloat16")),
    _case(2, 4096, 2560, benchmark=True),
    _case(8, 4096, 2560, benchmark=True),
    _case(2, 1024, 5120, benchmark=True),
    _case(8, 1024, 5120, benchmark=True),
    _case(2, 256, 10240, benchmark=True),
    _case(2, 4096, 5120, benchmark=True),
    _case(2, 1024, 10240, benchmark=True),
]
