"""Params, NumPy reference, test cases and benchmark shapes (GEGLU layers of Stable Diffusion) of LinearSplitGelu."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from math import prod

from custom_ops.operator_spec import DTYPES, INT32, INT64, POINTER, Array, OperatorCase, Shape, struct_fields
from custom_ops.operators.bias_split_gelu import cases as bias_split_gelu
from custom_ops.operators.linear_add import cases as linear_add

NAME = "LinearSplitGelu"
INPUTS = ("X", "W", "bias")
OUTPUTS = ("Y",)

generate_special_input = linear_add.generate_special_input


class Params(ctypes.Structure):
    """struct LinearSplitGeluParams of op.h."""

    _fields_ = struct_fields((INT32, "dtype"), (POINTER, "x weight bias y"), (INT64, "rows inner half"))


def params(case: OperatorCase, dtype: str, address: Mapping[str, int]) -> Params:
    """Return the Params of a case."""
    shape, (inner, columns) = case.inputs["X"], case.inputs["W"]
    pointers = (address[name] for name in ("X", "W", "bias", "Y"))
    return Params(DTYPES[dtype][0], *pointers, prod(shape[:-1]), inner, columns // 2)


def output_shapes(case: OperatorCase) -> dict[str, Shape]:
    """Y has the shape of X, its last axis half of W's."""
    return {"Y": (*case.inputs["X"][:-1], case.inputs["W"][1] // 2)}


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """X (..., K), W (K, D), bias (D) -> Y (..., D / 2) in float64."""
    product = linear_add.reference({"X": inputs["X"], "W": inputs["W"]}, {})["Y"]
    return bias_split_gelu.reference({"X": product, "bias": inputs["bias"]}, {})


def _case(*shape: int, half: int, benchmark: bool = False) -> OperatorCase:
    """X of `shape`, `half` columns of Y."""
    inputs: dict[str, Shape] = {"X": shape, "W": (shape[-1], 2 * half), "bias": (2 * half,)}
    name = "x".join(map(str, shape)) + f"-h{half}"
    # Sums of K products: their errors add up as sqrt(K).
    return OperatorCase(name, inputs, benchmark=benchmark, float32_roundoffs=8 + shape[-1] ** 0.5)


CASES = [
    _case(1, 1, half=1),
    _case(5, 7, half=3),
    _case(0, 4, 8, half=8),
    _case(2, 3, 16, half=40),
    _case(2, 20, 200, half=72),
    _case(150, 296, half=712),  # the warpgroup kernel: ragged tiles in every direction, several a block
    _case(2048, 1280, half=5120, benchmark=True),
    _case(8192, 640, half=2560, benchmark=True),
    _case(8192, 320, half=1280, benchmark=True),
    _case(2048, 640, half=2560, benchmark=True),
    _case(512, 1280, half=5120, benchmark=True),
]
