"""Params, NumPy reference, test cases and benchmark shapes of SkipLayerNormalization."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from math import prod

import numpy as np

from custom_ops.operator_spec import (
    DTYPES,
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
    with_quantized,
)

NAME = "SkipLayerNormalization"
INPUTS = ("input", "skip", "gamma", "beta", "bias")
OUTPUTS = ("output", "mean", "inv_std_var", "input_skip_bias_sum", QUANTIZED)


class Params(ctypes.Structure):
    """struct SkipLayerNormParams of op.h."""

    _fields_ = struct_fields(
        (INT32, "dtype"),
        (POINTER, "x skip gamma beta bias y sum"),
        (INT64, "rows skip_rows channels"),
        (FLOAT32, "epsilon"),
        (Float8Output, "quantized"),
    )


def params(case: OperatorCase, dtype: str, address: Mapping[str, int]) -> Params:
    """Return the Params of a case."""
    shape = case.inputs["input"]
    return Params(
        dtype=DTYPES[dtype][0],
        x=address["input"],
        skip=address["skip"],
        gamma=address["gamma"],
        beta=address.get("beta"),
        bias=address.get("bias"),
        y=address.get("output"),
        sum=address.get("input_skip_bias_sum"),
        rows=prod(shape[:-1]),
        skip_rows=prod(case.inputs["skip"][:-1]),
        channels=shape[-1],
        epsilon=case.attributes["epsilon"],
        quantized=float8_output(case, address),
    )


def output_shapes(case: OperatorCase) -> dict[str, Shape]:
    """All outputs have the shape of the input."""
    return dict.fromkeys(case.outputs or ("output", "input_skip_bias_sum"), case.inputs["input"])


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """input (N, S, C), skip (N or 1, S, C) or (S, C); gamma, beta?, bias? (C) -> output and the sum, as input."""
    total = inputs["input"].astype(np.float64) + inputs["skip"].astype(np.float64)
    if "bias" in inputs:
        total = total + inputs["bias"].astype(np.float64)
    mean = total.mean(axis=-1, keepdims=True)
    variance = total.var(axis=-1, keepdims=True)
    output = (total - mean) / np.sqrt(variance + attributes.get("epsilon", 1e-12)) * inputs["gamma"].astype(np.float64)
    if "beta" in inputs:
        output = output + inputs["beta"].astype(np.float64)
    return with_quantized({"output": output, "input_skip_bias_sum": total}, attributes)


def _case(
    shape: Shape,
    skip: Shape | None = None,
    beta: bool = True,
    bias: bool = True,
    total: bool = True,
    distribution: str = "normal",
    benchmark: bool = False,
    quantized: tuple[str, ...] = (),
) -> OperatorCase:
    """`quantized`: the outputs beside the sum, one of them in float8."""
    channels = shape[-1]
    inputs = {"input": shape, "skip": skip or shape, "gamma": (channels,)}
    if beta:
        inputs["beta"] = (channels,)
    if bias:
        inputs["bias"] = (channels,)
    broadcast = "x".join(map(str, inputs["skip"]))
    name = "x".join(map(str, shape)) + f"-skip{broadcast}-{beta:d}{bias:d}{total:d}-{distribution}"
    outputs = (*(quantized or ("output",)), *(("input_skip_bias_sum",) if total else ()))
    attributes: dict[str, int | float] = {"epsilon": 1e-5}
    if quantized:
        attributes["quantized_scale"] = 0.03125
        name += "-" + "-".join(quantized)
    return OperatorCase(name, inputs, attributes, outputs, distribution, benchmark)


CASES = [
    _case((1, 1, 1)),
    _case((2, 64, 32)),
    _case((1, 77, 320), beta=False),
    _case((1, 77, 768), bias=False),
    _case((3, 13, 97), total=False),
    _case((2, 31, 12), skip=(1, 31, 12)),
    _case((2, 31, 40), skip=(31, 40), bias=False),
    _case((2, 9, 24), skip=(24,), bias=False, total=False),
    _case((16, 7, 40), beta=False, bias=False, total=False),
    _case((5, 3, 1280)),
    _case((2, 3, 2056)),
    _case((1, 3, 1536)),
    _case((1, 2, 5200), bias=False),
    _case((1, 2, 10400)),
    _case((1, 2, 8200)),
    _case((1, 2, 20001)),
    _case((2, 31, 40), quantized=(QUANTIZED,)),
    _case((2, 9, 328), total=False, quantized=(QUANTIZED,)),
    _case((3, 13, 97), quantized=("output", QUANTIZED)),
    *(_case((2, 16, 64), distribution=distribution) for distribution in ("large", "tiny", "offset")),
    *(_case((n, 4096, 320), benchmark=True) for n in (2, 8, 16)),
    *(_case((n, 1024, 640), benchmark=True) for n in (2, 8)),
    *(_case((n, 256, 1280), benchmark=True) for n in (2, 8)),
    _case((2, 4096, 640), benchmark=True),
    _case((2, 4096, 640), benchmark=True, total=False, quantized=(QUANTIZED,)),
    _case((2, 1024, 1280), benchmark=True, total=False, quantized=(QUANTIZED,)),
    _case((2, 1024, 1280), benchmark=True),
]
