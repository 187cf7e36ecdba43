"""Params, NumPy reference, test cases and benchmark shapes of QuantizedNhwcConv."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from math import prod

import numpy as np

from custom_ops.operator_spec import DTYPES, INT32, INT64, POINTER, Array, OperatorCase, Shape, struct_fields
from custom_ops.operators.nhwc_conv.cases import reference as convolve
from custom_ops.operators.quantized_linear.cases import FLOAT8_SUM_NMSE, FORMATS

NAME = "QuantizedNhwcConv"
INPUTS = ("X", "W", "scale", "B", "skip")
OUTPUTS = ("Y",)
FLOAT32_INPUTS = ("scale",)
INTEGERS = {"X": "8 bits", "W": "8 bits"}
SPREAD = 100.0  # standard deviation of the elements of X and W


class Params(ctypes.Structure):
    """struct QuantizedNhwcConvParams of op.h."""

    _fields_ = struct_fields(
        (INT32, "dtype"),
        (POINTER, "x filters scale bias skip y"),
        (INT64, "batch height width channels filter_count"),
        (INT32, "scales"),
    )


def params(case: OperatorCase, dtype: str, address: Mapping[str, int]) -> Params:
    """Return the Params of a case."""
    pointers = (address.get(name, 0) for name in (*INPUTS, "Y"))
    sizes = (*case.inputs["X"], case.inputs["W"][0])
    return Params(DTYPES[dtype][0], *pointers, *sizes, int(case.inputs["scale"] == (1,)))


def output_shapes(case: OperatorCase) -> dict[str, Shape]:
    """Y is (N, H, W, M)."""
    return {"Y": (*case.inputs["X"][:3], case.inputs["W"][0])}


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """X (N, H, W, C) and W (M, 3, 3, C) in float8, scale (1) or (M), B (M), skip as Y? -> Y (N, H, W, M) in float64."""
    elements = {name: inputs[name].astype(np.float32) for name in ("X", "W")}
    pads = dict.fromkeys((f"pad_{side}" for side in ("top", "left", "bottom", "right")), 1)
    sums = convolve(elements, pads)["Y"]
    added = inputs["B"].astype(np.float64) + inputs.get("skip", np.zeros(1)).astype(np.float64)
    return {"Y": sums * inputs["scale"].astype(np.float64) + added}


def generate_special_input(case: OperatorCase, name: str, rng: np.random.Generator) -> Array | None:
    """Generate elements of the whole range of float8, and scales that give Y a magnitude of about 1."""
    shape = case.inputs[name]
    if name == "scale":
        return rng.uniform(0.5, 1.5, shape) / (SPREAD**2 * max(prod(case.inputs["W"][1:]), 1) ** 0.5)
    if name not in INTEGERS:
        return None
    float8 = FORMATS["float8"][1]
    elements = (rng.standard_normal(shape) * SPREAD).clip(-448, 448).astype(float8)
    return (elements.astype(np.float32) + 0.0).astype(float8)  # zeros are positive: -0 is NaN in the FNUZ format


def _case(*image: int, m: int, channels: bool = False, skip: bool = False, benchmark: bool = False) -> OperatorCase:
    """X of (N, H, W, C) and `m` filters, with a scale each where `channels`."""
    inputs: dict[str, Shape] = {"X": image, "W": (m, 3, 3, image[3]), "scale": (m if channels else 1,), "B": (m,)}
    if skip:
        inputs["skip"] = (*image[:3], m)
    inner = 9 * image[3]
    name = "x".join(map(str, image)) + f"-m{m}" + "-channels" * channels + "-skip" * skip
    return OperatorCase(
        name, inputs, {}, benchmark=benchmark, float32_roundoffs=80 + inner**0.5,
        sum_nmse=FLOAT8_SUM_NMSE * inner,
    )  # fmt: skip


# One pixel and odd channels, images and filters that no tile divides, several tiles of a block, and sums of one stage
# and of many, some divided among blocks, in each kernel.
CASES = [
    _case(1, 1, 1, 1, m=1),
    _case(2, 5, 7, 3, m=5, channels=True, skip=True),
    _case(2, 5, 6, 6, m=5, channels=True),
    _case(1, 16, 8, 16, m=8),
    _case(2, 17, 9, 48, m=24, channels=True),
    _case(1, 7, 12, 80, m=168, skip=True),
    _case(3, 33, 10, 64, m=136, channels=True, skip=True),
    _case(1, 8, 8, 320, m=320, skip=True),
    _case(2, 64, 160, 16, m=168, skip=True),
    _case(1, 9, 12, 400, m=40, channels=True, skip=True),
    _case(0, 4, 4, 16, m=16),
    _case(2, 64, 64, 320, m=320, skip=True, benchmark=True),
    _case(2, 32, 32, 640, m=640, skip=True, benchmark=True),
    _case(2, 16, 16, 1280, m=1280, skip=True, benchmark=True),
    _case(2, 8, 8, 1280, m=1280, skip=True, benchmark=True),
    _case(2, 128, 128, 320, m=320, skip=True, benchmark=True),
    _case(2, 64, 64, 640, m=640, skip=True, benchmark=True),
    _case(2, 32, 32, 1280, m=1280, skip=True, benchmark=True),
    _case(1, 256, 256, 512, m=512, skip=True, benchmark=True),
    _case(1, 1024, 1024, 128, m=128, skip=True, benchmark=True),
]
