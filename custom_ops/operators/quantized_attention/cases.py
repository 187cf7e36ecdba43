"""Params, NumPy reference, test cases and benchmark shapes of QuantizedAttention."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np

from custom_ops.operator_spec import (
    DTYPES,
    FLOAT8,
    FLOAT32,
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
)
from custom_ops.operators.multi_head_attention import cases as attention

NAME = "QuantizedAttention"
INPUTS = ("QKV",)
OUTPUTS = (QUANTIZED,)
INTEGERS = {"QKV": "8 bits"}
FLOAT8_WEIGHTS_NMSE = 4e-3  # kFloat8WeightsNmse of op.h


class Params(ctypes.Structure):
    """struct QuantizedAttentionParams of op.h."""

    _fields_ = struct_fields(
        (INT32, "dtype"),
        (POINTER, "qkv"),
        (Float8Output, "quantized"),
        (INT64, "batch heads sequence head_size"),
        (FLOAT32, "scale"),
    )


def params(case: OperatorCase, dtype: str, address: Mapping[str, int]) -> Params:
    """Return the Params of a case."""
    batch, sequence, heads, _, head_size = case.inputs["QKV"]
    return Params(
        dtype=DTYPES[dtype][0],
        qkv=address["QKV"],
        quantized=float8_output(case, address),
        batch=batch,
        heads=heads,
        sequence=sequence,
        head_size=head_size,
        scale=case.attributes["scale"],
    )


def output_shapes(case: OperatorCase) -> dict[str, Shape]:
    """The output is (B, S, N * H)."""
    batch, sequence, heads, _, head_size = case.inputs["QKV"]
    return {QUANTIZED: (batch, sequence, heads * head_size)}


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """QKV (B, S, N, 3, H) in float8 -> attention of its elements / quantized_scale in float8."""
    elements = inputs["QKV"].astype(np.float32)
    return {QUANTIZED: attention.reference({"query": elements}, attributes)[QUANTIZED]}


def generate_special_input(case: OperatorCase, name: str, rng: np.random.Generator) -> Array:
    """Elements of N(0, 32), "peaked" of N(0, 150) where all weight falls on one key. Zeros are positive (FNUZ)."""
    spread = 150.0 if case.distribution == "peaked" else 32.0
    elements = (rng.standard_normal(case.inputs[name]) * spread).clip(-448.0, 448.0)
    return (elements.astype(FLOAT8).astype(np.float32) + 0.0).astype(FLOAT8)


def _case(
    batch: int, sequence: int, heads: int, head_size: int, *, distribution: str = "normal", benchmark: bool = False
) -> OperatorCase:
    """QKV of these sizes. The scales are those of elements that a scale of 1 / 32 multiplies."""
    name = f"{batch}x{sequence}x{heads}x{head_size}" + ("-peaked" if distribution == "peaked" else "")
    attributes: dict[str, int | float] = {
        "num_heads": heads,
        "scale": head_size**-0.5 / 32**2,
        "quantized_scale": 0.25,
    }
    return OperatorCase(
        name, {"QKV": (batch, sequence, heads, 3, head_size)}, attributes, distribution=distribution,
        benchmark=benchmark, dtypes=("float16",), sum_nmse=FLOAT8_WEIGHTS_NMSE,
    )  # fmt: skip


CASES = [
    _case(1, 1, 1, 1),
    _case(2, 37, 3, 16),
    _case(1, 5, 2, 7),
    _case(2, 64, 2, 64, distribution="peaked"),
    _case(1, 150, 4, 64),
    _case(1, 96, 1, 128),
    _case(0, 16, 2, 64),
    _case(4, 4096, 10, 64, benchmark=True),
    _case(4, 1024, 20, 64, benchmark=True),
    _case(2, 4096, 10, 64, benchmark=True),
    _case(2, 1024, 20, 64, benchmark=True),
]
