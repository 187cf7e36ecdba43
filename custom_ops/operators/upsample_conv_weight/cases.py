"""Params, NumPy reference, test cases and benchmark shapes (weights of SDXL and a VAE) of UpsampleConvWeight."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np

from custom_ops.operator_spec import DTYPES, INT32, INT64, POINTER, Array, OperatorCase, Shape, struct_fields

NAME = "UpsampleConvWeight"
INPUTS = ("weight",)
OUTPUTS = ("Y",)


class Params(ctypes.Structure):
    """struct UpsampleConvWeightParams of op.h."""

    _fields_ = struct_fields((INT32, "dtype"), (POINTER, "weight y"), (INT64, "filters channels"))


def params(case: OperatorCase, dtype: str, address: Mapping[str, int]) -> Params:
    """Return the Params of a case."""
    filters, _, _, channels = case.inputs["weight"]
    return Params(DTYPES[dtype][0], address["weight"], address["Y"], filters, channels)


def output_shapes(case: OperatorCase) -> dict[str, Shape]:
    """Y (C, 4, 4, M) of weight (M, 3, 3, C)."""
    filters, _, _, channels = case.inputs["weight"]
    return {"Y": (channels, 4, 4, filters)}


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """weight (M, 3, 3, C) -> Y (C, 4, 4, M) in float64: the full convolution of the turned taps with 2 x 2 ones."""
    turned = inputs["weight"].astype(np.float64)[:, ::-1, ::-1].transpose(3, 1, 2, 0)
    y = np.zeros((turned.shape[0], 4, 4, turned.shape[3]))
    for down, across in np.ndindex(2, 2):
        y[:, down : down + 3, across : across + 3] += turned
    return {"Y": y}


def _case(filters: int, channels: int, distribution: str = "normal", benchmark: bool = False) -> OperatorCase:
    return OperatorCase(
        f"{filters}x{channels}-{distribution}",
        {"weight": (filters, 3, 3, channels)},
        distribution=distribution,
        benchmark=benchmark,
    )


CASES = [
    _case(1, 1),
    _case(40, 33),
    _case(32, 64),
    _case(3, 70),
    _case(0, 8),
    _case(8, 16, distribution="tiny"),
    _case(640, 640, benchmark=True),
    _case(1280, 1280, benchmark=True),
    _case(512, 512, benchmark=True),
]
