"""WinogradFilters: the calls that test it, and the weights of SDXL that time it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

from custom_ops.operator_spec import DTYPES, Case, Shape

NAME = "WinogradFilters"
INPUTS = ("weight",)
OUTPUTS = ("Y",)
PARAMETERS = ()


class Params(ctypes.Structure):
    """struct WinogradFiltersParams of op.h."""

    _fields_ = (
        ("dtype", ctypes.c_int32),
        ("weight", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("filters", ctypes.c_int64),
        ("channels", ctypes.c_int64),
        ("upsampled", ctypes.c_int64),
    )


def params(case: Case, dtype: str, address: Mapping[str, int]) -> Params:
    """The call's Params; `address` maps input and output names to device addresses."""
    filters, _, _, channels = case.inputs["weight"]
    return Params(DTYPES[dtype][0], address["weight"], address["Y"], filters, channels, _doubled(case))


def output_shapes(case: Case) -> dict[str, Shape]:
    """Y (16, M, C) of weight (M, 3, 3, C); (9, M, C) where it is for upsampled images."""
    filters, _, _, channels = case.inputs["weight"]
    return {"Y": (9 if _doubled(case) else 16, filters, channels)}


def _doubled(case: Case) -> int:
    return int(case.attributes.get("upsampled", 0))


def _case(filters: int, channels: int, upsampled: bool = False, values: str = "normal", benchmark: bool = False) -> Case:
    return Case(
        f"{filters}x{channels}-d{upsampled:d}-{values}",
        {"weight": (filters, 3, 3, channels)},
        {"upsampled": int(upsampled)},
        values=values,
        benchmark=benchmark,
    )


CASES = [
    _case(1, 1),
    _case(5, 33),
    _case(20, 64),
    _case(3, 70),
    _case(0, 8),
    _case(8, 16, values="tiny"),
    _case(8, 16, values="large"),
    _case(5, 33, upsampled=True),
    _case(20, 64, upsampled=True),
    _case(640, 640, benchmark=True),
    _case(1280, 1280, benchmark=True),
    _case(1280, 1280, upsampled=True, benchmark=True),
]
