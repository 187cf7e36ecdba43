"""UpsampleConvWeight: the calls that test it, and the weights of SDXL and a VAE that time it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

from custom_ops.operator_spec import DTYPES, Case, Shape

NAME = "UpsampleConvWeight"
INPUTS = ("weight",)
OUTPUTS = ("Y",)
PARAMETERS = ()


class Params(ctypes.Structure):
    """struct UpsampleConvWeightParams of op.h."""

    _fields_ = (
        ("dtype", ctypes.c_int32),
        ("weight", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("filters", ctypes.c_int64),
        ("channels", ctypes.c_int64),
    )


def params(case: Case, dtype: str, address: Mapping[str, int]) -> Params:
    """The call's Params; `address` maps input and output names to device addresses."""
    filters, _, _, channels = case.inputs["weight"]
    return Params(DTYPES[dtype][0], address["weight"], address["Y"], filters, channels)


def output_shapes(case: Case) -> dict[str, Shape]:
    """Y (C, 4, 4, M) of weight (M, 3, 3, C)."""
    filters, _, _, channels = case.inputs["weight"]
    return {"Y": (channels, 4, 4, filters)}


def _case(filters: int, channels: int, values: str = "normal", benchmark: bool = False) -> Case:
    return Case(
        f"{filters}x{channels}-{values}", {"weight": (filters, 3, 3, channels)}, values=values, benchmark=benchmark
    )


CASES = [
    _case(1, 1),
    _case(40, 33),
    _case(32, 64),
    _case(3, 70),
    _case(0, 8),
    _case(8, 16, values="tiny"),
    _case(640, 640, benchmark=True),
    _case(1280, 1280, benchmark=True),
    _case(512, 512, benchmark=True),
]
