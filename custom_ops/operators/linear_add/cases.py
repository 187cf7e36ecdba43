"""Params, NumPy reference, test cases and benchmark shapes (products of Stable Diffusion) of LinearAdd."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from math import prod

import numpy as np

from custom_ops.operator_spec import DTYPES, INT32, INT64, POINTER, Array, OperatorCase, Shape, struct_fields

NAME = "LinearAdd"
INPUTS = ("X", "W", "bias", "skip")
OUTPUTS = ("Y",)


class Params(ctypes.Structure):
    """struct LinearAddParams of op.h."""

    _fields_ = struct_fields(
        (INT32, "dtype"), (POINTER, "x weight bias skip y"), (INT64, "rows inner columns"), (INT32, "gelu")
    )


def params(case: OperatorCase, dtype: str, address: Mapping[str, int]) -> Params:
    """Return the Params of a case."""
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
        gelu=case.attributes.get("gelu", 0),
    )


def output_shapes(case: OperatorCase) -> dict[str, Shape]:
    """Y has the shape of X, its last axis W's."""
    return {"Y": (*case.inputs["X"][:-1], case.inputs["W"][1])}


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """X (..., K), W (K, N), bias (N) or absent, skip (..., N) or absent -> Y (..., N) in float64."""
    y = inputs["X"].astype(np.float64) @ inputs["W"].astype(np.float64)
    for name in ("bias", "skip"):
        if name in inputs:
            y = y + inputs[name].astype(np.float64)
    if attributes.get("gelu", 0):
        y = 0.5 * y * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (y + 0.044715 * y**3)))
    return {"Y": y}


def generate_special_input(case: OperatorCase, name: str, rng: np.random.Generator) -> Array | None:
    """Generate weights that keep the magnitude of the input; also for malformed shapes."""
    shape = case.inputs[name]
    return rng.standard_normal(shape) / np.sqrt(max((*shape, 1)[0], 1)) if name == "W" else None


def _case(
    *shape: int, n: int, bias: bool = True, skip: bool = True, gelu: bool = False, distribution: str = "normal",
    benchmark: bool = False,
) -> OperatorCase:  # fmt: skip
    """X of `shape`, `n` columns."""
    inputs: dict[str, Shape] = {"X": shape, "W": (shape[-1], n)}
    if bias:
        inputs["bias"] = (n,)
    if skip:
        inputs["skip"] = (*shape[:-1], n)
    name = "x".join(map(str, shape)) + f"-n{n}-b{bias:d}-s{skip:d}{'-gelu' * gelu}-{distribution}"
    # Sums of K products: their errors add up as sqrt(K). cuBLASLt's GELU has an error of about 4e-6 in float32.
    return OperatorCase(
        name, inputs, {"gelu": int(gelu)}, distribution=distribution, benchmark=benchmark,
        float32_roundoffs=(80 if gelu else 4) + shape[-1] ** 0.5,
    )  # fmt: skip


CASES = [
    _case(1, 1, n=1),
    _case(5, 7, n=3),
    _case(2, 3, 16, n=40),
    _case(2, 9, 33, n=17, bias=False),
    _case(3, 4, 5, 24, n=8, skip=False),
    _case(2, 6, 8, n=24, bias=False, skip=False),
    _case(2, 5, 24, n=40, skip=False, gelu=True),
    _case(3, 7, n=5, bias=False, skip=False, gelu=True),
    _case(0, 4, 8, n=8),
    _case(2, 64, 64, n=64, distribution="large"),
    _case(2, 64, 64, n=64, distribution="tiny"),
    _case(2, 13, 320, n=64),
    # Several tiles; depth split over blocks, with 8 elements at a time and one.
    _case(3, 45, 40, n=136),
    _case(6, 1056, n=72),
    _case(7, 1061, n=9, skip=False, gelu=True),
    _case(8192, 320, n=320, benchmark=True),
    _case(8192, 320, n=960, bias=False, skip=False, benchmark=True),
    _case(8192, 320, n=2560, bias=False, skip=False, benchmark=True),
    _case(8192, 1280, n=320, benchmark=True),
    _case(2048, 2560, n=640, benchmark=True),
    _case(512, 5120, n=1280, benchmark=True),
    # FLUX.1 at 1024 x 1024
    _case(4608, 3072, n=9216, skip=False, benchmark=True),
    _case(4608, 3072, n=12288, skip=False, gelu=True, benchmark=True),
    _case(4608, 12288, n=3072, benchmark=True),
]
