"""Params, NumPy reference, test cases and benchmark shapes of QuantizedLinear. A case's distribution is its format."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from math import prod

import ml_dtypes
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
from custom_ops.operators.bias_split_gelu.cases import gelu_gate

NAME = "QuantizedLinear"
INPUTS = ("X", "W", "scale", "bias", "skip")
OUTPUTS = ("Y", QUANTIZED)
FLOAT32_INPUTS = ("scale",)
INTEGERS = {"X": "8 bits", "W": "8 bits"}
FLOAT8_SUM_NMSE = 3e-9  # a product: kFloat8SumNmse of op.h
FORMATS = {"float8": (3, np.dtype(ml_dtypes.float8_e4m3fn)), "int8": (4, np.dtype(np.int8))}


class Params(ctypes.Structure):
    """struct QuantizedLinearParams of op.h."""

    _fields_ = struct_fields(
        (INT32, "dtype eight_bits"),
        (POINTER, "x weight scale bias skip y"),
        (INT64, "rows inner columns"),
        (INT32, "scales gelu gated"),
        (Float8Output, "quantized"),
        (POINTER, "packed_weights packed"),
    )


def params(case: OperatorCase, dtype: str, address: Mapping[str, int]) -> Params:
    """Return the Params of a case."""
    shape, (columns, inner) = case.inputs["X"], case.inputs["W"]
    return Params(
        dtype=DTYPES[dtype][0],
        eight_bits=FORMATS[case.distribution][0],
        x=address["X"],
        weight=address["W"],
        scale=address["scale"],
        bias=address["bias"],
        skip=address.get("skip", 0),
        y=address.get("Y"),
        rows=prod(shape[:-1]),
        inner=inner,
        columns=columns,
        scales=int(case.inputs["scale"] == (1,)),
        gelu=case.attributes["gelu"],
        gated=case.attributes["gated"],
        quantized=float8_output(case, address),
    )


def output_shapes(case: OperatorCase) -> dict[str, Shape]:
    """The outputs have the shape of X, their last axis W's first, or half of it if gated."""
    shape = (*case.inputs["X"][:-1], case.inputs["W"][0] // (2 if case.attributes["gated"] else 1))
    return dict.fromkeys(case.outputs or ("Y",), shape)


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """X (..., K) and W (N, K) of 8 bits, scale (1) or (N), bias (N), skip (..., N) or absent -> Y in float64."""
    x, w = (inputs[name].astype(np.float32).astype(np.float64) for name in ("X", "W"))
    y = (x @ w.T) * inputs["scale"].astype(np.float64) + inputs["bias"].astype(np.float64)
    if "skip" in inputs:
        y = y + inputs["skip"].astype(np.float64)
    if attributes["gelu"]:
        y = 0.5 * y * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (y + 0.044715 * y**3)))
    if attributes["gated"]:
        left, right = np.split(y, 2, axis=-1)
        y = gelu_gate(left, right)
    return with_quantized({"Y": y}, attributes)


def generate_special_input(case: OperatorCase, name: str, rng: np.random.Generator) -> Array:
    """Generate elements of the whole range of the format, and scales that give Y a magnitude of about 1."""
    shape, is_int8 = case.inputs[name], case.distribution == "int8"
    spread = 40.0 if is_int8 else 100.0
    if name == "scale":
        return rng.uniform(0.5, 1.5, shape) / (spread**2 * np.sqrt(max(case.inputs["W"][1], 1)))
    values = rng.standard_normal(shape)
    if name not in INTEGERS:
        return values
    limit = 127.0 if is_int8 else 448.0
    elements = (values * spread).clip(-limit, limit)
    # Without negative zero, whose bits are NaN in the FNUZ format.
    return ((np.rint(elements) if is_int8 else elements.astype(FORMATS["float8"][1]).astype(np.float32)) + 0.0).astype(
        FORMATS[case.distribution][1]
    )


def _case(
    *shape: int, n: int, form: str = "float8", channels: bool = False, skip: bool = False, gelu: bool = False,
    gated: bool = False, benchmark: bool = False, quantized: tuple[str, ...] = (), quantized_scale: float = 0.015625,
) -> OperatorCase:  # fmt: skip
    """X of `shape`, `n` rows of W. `quantized`: the outputs, one of them in float8, divided by `quantized_scale`."""
    inputs: dict[str, Shape] = {"X": shape, "W": (n, shape[-1]), "scale": (n if channels else 1,), "bias": (n,)}
    if skip:
        inputs["skip"] = (*shape[:-1], n)
    words = [form, *(word for word, used in (("channels", channels), ("skip", skip), ("gelu", gelu), ("gated", gated))
                     if used)]  # fmt: skip
    name = "x".join(map(str, shape)) + f"-n{n}-" + "-".join(words)
    attributes: dict[str, int | float] = {"gelu": int(gelu), "gated": int(gated)}
    if quantized:
        attributes["quantized_scale"] = quantized_scale
        name += "-" + "-".join(quantized)
    return OperatorCase(
        name, inputs, attributes, quantized or None, distribution=form, benchmark=benchmark,
        float32_roundoffs=80 + shape[-1] ** 0.5, sum_nmse=FLOAT8_SUM_NMSE * shape[-1] if form == "float8" else 0.0,
    )  # fmt: skip


CASES = [
    _case(1, 1, n=2, channels=True),
    _case(5, 7, n=3, form="int8"),
    _case(2, 3, 16, n=48),
    _case(2, 9, 48, n=32, skip=True),
    _case(3, 4, 5, 24, n=8, form="int8", channels=True, skip=True),
    _case(40, 80, n=64, channels=True),
    _case(2, 5, 32, n=48, gelu=True),
    _case(3, 7, n=6, form="int8", gelu=True),
    _case(2, 5, 32, n=48, gated=True),
    _case(3, 7, n=6, form="int8", channels=True, gated=True),
    _case(0, 4, 16, n=16),
    _case(3, 41, 400, n=176, gated=True),
    _case(60, 656, n=560, gated=True),
    _case(2, 35, 512, n=336, gated=True),
    _case(2, 9, 48, n=32, skip=True, quantized=("Y", QUANTIZED)),
    _case(3, 7, n=6, form="int8", channels=True, quantized=(QUANTIZED,)),
    _case(2, 5, 32, n=64, gated=True, quantized=("Y", QUANTIZED)),
    _case(60, 656, n=544, gated=True, quantized=(QUANTIZED,)),
    _case(2, 150, 512, n=352, gated=True, quantized=(QUANTIZED,)),
    _case(60, 656, n=560, quantized=(QUANTIZED,), quantized_scale=1e-3),  # most elements saturate
    _case(2, 35, 512, n=336, skip=True, quantized=(QUANTIZED,)),
    _case(2, 35, 128, n=64, gelu=True, quantized=(QUANTIZED,)),
    _case(8, 16384, n=32),
    _case(8192, 640, n=640, benchmark=True),
    _case(8192, 640, n=640, skip=True, benchmark=True),
    _case(8192, 640, n=1920, benchmark=True),
    _case(8192, 640, n=1920, benchmark=True, quantized=(QUANTIZED,)),
    _case(8192, 640, n=5120, gated=True, benchmark=True),
    _case(8192, 640, n=5120, gated=True, benchmark=True, quantized=(QUANTIZED,)),
    _case(8192, 2560, n=640, skip=True, benchmark=True),
    _case(2048, 1280, n=1280, skip=True, benchmark=True),
    _case(2048, 1280, n=3840, benchmark=True),
    _case(2048, 1280, n=3840, benchmark=True, quantized=(QUANTIZED,)),
    _case(2048, 1280, n=10240, gated=True, benchmark=True),
    _case(2048, 1280, n=10240, gated=True, benchmark=True, quantized=(QUANTIZED,)),
    _case(2048, 5120, n=1280, skip=True, benchmark=True),
]
