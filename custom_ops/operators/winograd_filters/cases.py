"""Params, NumPy reference, test cases and benchmark shapes (weights of SDXL) of WinogradFilters."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np

from custom_ops.operator_spec import DTYPES, INT32, INT64, POINTER, Array, OperatorCase, Shape, struct_fields

NAME = "WinogradFilters"
INPUTS = ("weight",)
OUTPUTS = ("Y",)


class Params(ctypes.Structure):
    """struct WinogradFiltersParams of op.h."""

    _fields_ = struct_fields((INT32, "dtype"), (POINTER, "weight y"), (INT64, "filters channels upsampled"))


def params(case: OperatorCase, dtype: str, address: Mapping[str, int]) -> Params:
    """Return the Params of a case."""
    filters, _, _, channels = case.inputs["weight"]
    return Params(DTYPES[dtype][0], address["weight"], address["Y"], filters, channels, _upsampled(case))


def output_shapes(case: OperatorCase) -> dict[str, Shape]:
    """Y (16, M, C) of weight (M, 3, 3, C); (9, M, C) where it is for upsampled images."""
    filters, _, _, channels = case.inputs["weight"]
    return {"Y": (9 if _upsampled(case) else 16, filters, channels)}


# Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", arXiv 1509.09308, section 4.1.
G = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """weight (M, 3, 3, C) -> Y (16, M, C), or (9, M, C) of attribute `upsampled`, in float64."""
    weight = inputs["weight"].astype(np.float64)
    g = G[[0, 1, 3]] if attributes.get("upsampled") else G
    y = np.einsum("ai,mijc,bj->abmc", g, weight, g, optimize=True)
    return {"Y": y.reshape(len(g) ** 2, weight.shape[0], weight.shape[3])}


def _upsampled(case: OperatorCase) -> int:
    return int(case.attributes.get("upsampled", 0))


def _case(
    filters: int, channels: int, upsampled: bool = False, distribution: str = "normal", benchmark: bool = False
) -> OperatorCase:
    return OperatorCase(
        f"{filters}x{channels}-d{upsampled:d}-{distribution}",
        {"weight": (filters, 3, 3, channels)},
        {"upsampled": int(upsampled)},
        distribution=distribution,
        benchmark=benchmark,
    )


CASES = [
    _case(1, 1),
    _case(5, 33),
    _case(20, 64),
    _case(3, 70),
    _case(0, 8),
    _case(8, 16, distribution="tiny"),
    _case(8, 16, distribution="large"),
    _case(5, 33, upsampled=True),
    _case(20, 64, upsampled=True),
    _case(640, 640, benchmark=True),
    _case(1280, 1280, benchmark=True),
    _case(1280, 1280, upsampled=True, benchmark=True),
]
