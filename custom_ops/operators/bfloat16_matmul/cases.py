"""Params, NumPy reference and test cases of Bfloat16MatMul, which has no GPU kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from math import prod

import ml_dtypes
import numpy as np

from custom_ops.operator_spec import DTYPES, INT32, INT64, POINTER, Array, OperatorCase, Shape, struct_fields
from custom_ops.operators.bias_split_gelu.cases import gelu_gate

NAME = "Bfloat16MatMul"
INPUTS = ("X", "W", "bias")
OUTPUTS = ("Y",)
FLOAT32_INPUTS = ("bias",)


class Params(ctypes.Structure):
    """struct Bfloat16MatMulParams of op.h."""

    _fields_ = struct_fields(
        (INT32, "dtype weight_dtype y_dtype gated"),
        (POINTER, "x weight bias y"),
        (INT64, "rows inner columns"),
        (POINTER, "packed_weights packed"),
    )


def params(case: OperatorCase, dtype: str, address: Mapping[str, int]) -> Params:
    """Return the Params of a case."""
    number, gated = DTYPES[dtype][0], int(case.attributes.get("gated", 0))
    pointers = (address["X"], address["W"], address.get("bias", 0), address["Y"])
    return Params(number, number, number, gated, *pointers, prod(case.inputs["X"][:-1]), *case.inputs["W"])


def output_shapes(case: OperatorCase) -> dict[str, Shape]:
    """Y has the shape of X, its last axis W's, or half of it where gated."""
    return {"Y": (*case.inputs["X"][:-1], case.inputs["W"][1] // (1 + int(case.attributes.get("gated", 0))))}


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """X (..., K), W (K, N), bias (N) -> Y (..., N)."""
    x, w = (inputs[name].astype(ml_dtypes.bfloat16).astype(np.float64) for name in ("X", "W"))
    y = x @ w + (inputs["bias"].astype(np.float64) if "bias" in inputs else 0)
    if attributes.get("gated", 0):
        left, right = np.split(y, 2, axis=-1)
        y = gelu_gate(left, right)
    return {"Y": y}


def generate_special_input(case: OperatorCase, name: str, rng: np.random.Generator) -> Array | None:
    """Generate weights that keep the magnitude of the input."""
    shape = case.inputs[name]
    return rng.standard_normal(shape) / np.sqrt(max(1, *shape[:1])) if name == "W" else None


def _case(*shape: int, n: int, bias: bool = True, gated: bool = False, distribution: str = "normal") -> OperatorCase:
    """X of `shape`, `n` columns."""
    inputs: dict[str, Shape] = {"X": shape, "W": (shape[-1], n), **({"bias": (n,)} if bias else {})}
    name = "x".join(map(str, shape)) + f"-n{n}-b{bias:d}-{distribution}" + "-gated" * gated
    attributes: dict[str, int | float] = {"gated": 1} if gated else {}
    return OperatorCase(
        name,
        inputs,
        attributes,
        distribution=distribution,
        dtypes=("float32", "bfloat16"),
        float32_roundoffs=8 + shape[-1] ** 0.5,
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
    _case(2, 64, 64, n=64, distribution="large"),
    _case(3, 24, n=2, gated=True),
    _case(70, 40, n=88, gated=True),
    _case(2, 40, 64, n=64, bias=False, gated=True),
]
