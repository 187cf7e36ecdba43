"""QuantizedConv: Bfloat16Conv's kernel with int8 elements, so only the calls differ."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np

from custom_ops.operator_spec import Array, OperatorCase
from custom_ops.operators.bfloat16_conv.cases import CASES as CONVOLUTIONS
from custom_ops.operators.bfloat16_conv.cases import convolve, output_shapes
from custom_ops.operators.bfloat16_conv.cases import params as convolution_params

__all__ = ["CASES", "FLOAT32_INPUTS", "INPUTS", "INTEGERS", "NAME", "OUTPUTS", "output_shapes", "params"]

NAME = "QuantizedConv"
INPUTS = ("X", "W", "scale", "B")
OUTPUTS = ("Y",)
FLOAT32_INPUTS = ("scale",)
INTEGERS = {"X": "int8", "W": "int8"}
INT8 = 4  # custom_ops/common/op.h: enum DType


def params(case: OperatorCase, dtype: str, address: Mapping[str, int]) -> ctypes.Structure:
    """Return the Params of a case."""
    result = convolution_params(case, dtype, address)
    result.weight_dtype, result.scale, result.scales = INT8, address["scale"], int(case.inputs["scale"] == (1,))
    return result


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """X (N, C, H, W) and W (M, C, k, k) in int8, scale (1) or (M), B (M) -> Y as Bfloat16Conv, in float64."""
    x, w = (inputs[name].astype(np.float64) for name in ("X", "W"))
    return {"Y": convolve(x, w, inputs["B"], attributes, inputs["scale"])}


def generate_special_input(case: OperatorCase, name: str, rng: np.random.Generator) -> Array | None:
    """Generate elements of the full range, and scales that give Y a magnitude of about 1."""
    shape = case.inputs[name]
    if name == "scale":
        return rng.uniform(0.5, 1.5, shape) / (74.0**2 * np.sqrt(np.prod(case.inputs["W"][1:])))
    return rng.integers(-128, 128, shape, np.int8) if name in INTEGERS else None


def _case(index: int, case: OperatorCase) -> OperatorCase:
    """A case with its bias, and one scale for all filters or one each."""
    filters = case.inputs["W"][0]
    scale = (1 if index % 3 == 1 else filters,)
    inputs = {"X": case.inputs["X"], "W": case.inputs["W"], "scale": scale, "B": (filters,)}
    return OperatorCase(f"{case.name}-s{scale[0]}", inputs, case.attributes, dtypes=("float32",))


# The two with other magnitudes of X are cases of the elements' range here.
CASES = [_case(index, case) for index, case in enumerate(CONVOLUTIONS) if case.distribution == "normal"]
