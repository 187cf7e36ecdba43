"""Params, NumPy reference, test cases and benchmark shapes of SwiGlu."""

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

NAME = "SwiGlu"
INPUTS = ("gate", "up")
OUTPUTS = ("Y", QUANTIZED)


class Params(ctypes.Structure):
    """struct SwiGluParams of op.h."""

    _fields_ = struct_fields(
        (INT32, "dtype"), (POINTER, "gate up y"), (INT64, "rows columns stride"), (Float8Output, "quantized")
    )


def params(case: OperatorCase, dtype: str, address: Mapping[str, int]) -> Params:
    """Return the Params of a case."""
    number, kind = DTYPES[dtype]
    shape = case.inputs["gate"]
    columns = next(iter(output_shapes(case).values()))[-1]
    return Params(
        dtype=number,
        gate=address["gate"],
        up=address.get("up") or address["gate"] + columns * kind.itemsize,
        y=address.get("Y"),
        rows=prod(shape[:-1]),
        columns=columns,
        stride=shape[-1],
        quantized=float8_output(case, address),
    )


def output_shapes(case: OperatorCase) -> dict[str, Shape]:
    """Both outputs have the shape of gate, or half of its last axis without up."""
    shape = case.inputs["gate"]
    return dict.fromkeys(case.outputs or ("Y",), shape if "up" in case.inputs else (*shape[:-1], shape[-1] // 2))


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """gate, up (..., C), or gate (..., 2 * C) -> Y (..., C) = silu(gate) * up."""
    gate = inputs["gate"].astype(np.float64)
    gate, up = (gate, inputs["up"].astype(np.float64)) if "up" in inputs else np.split(gate, 2, axis=-1)
    return with_quantized({"Y": gate / (1 + np.exp(-gate.clip(-700))) * up}, attributes)


def _case(
    shape: Shape, halves: bool = True, distribution: str = "normal", benchmark: bool = False,
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16"), quantized: tuple[str, ...] = (),
) -> OperatorCase:  # fmt: skip
    """`quantized`: the outputs, one of them in float8."""
    inputs = {"gate": shape} if halves else {"gate": shape, "up": shape}
    name = "-".join(("x".join(map(str, shape)), *("up",) * (not halves), distribution, *quantized))
    attributes: dict[str, int | float] = {"quantized_scale": 0.03125} if quantized else {}
    # the exponential is good to two roundoffs
    return OperatorCase(
        name, inputs, attributes, quantized or None, distribution, benchmark=benchmark, dtypes=dtypes,
        float32_roundoffs=8,
    )  # fmt: skip


CASES = [
    _case((1, 1, 2)),
    _case((1, 1), halves=False),
    _case((2, 64, 64)),
    _case((3, 13, 194)),
    _case((3, 13, 97), halves=False),
    _case((2, 31, 24), halves=False),
    _case((5, 2560)),
    _case((2, 31, 64), quantized=(QUANTIZED,)),
    _case((3, 13, 97), halves=False, quantized=("Y", QUANTIZED)),
    # gate * up must fit: not so in float16
    *(_case((2, 16, 64), halves, each, dtypes=("float32", "bfloat16")) for halves in (True, False)
      for each in ("tiny", "large")),
    _case((1, 4608, 18432), benchmark=True),
    _case((2, 4608, 18432), benchmark=True),
    _case((1, 512, 9728), halves=False, benchmark=True),
]  # fmt: skip
