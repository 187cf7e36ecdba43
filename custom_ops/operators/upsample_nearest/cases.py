"""Params, NumPy reference, test cases and benchmark shapes of UpsampleNearest."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np

from custom_ops.operator_spec import DTYPES, INT32, INT64, POINTER, Array, OperatorCase, Shape, struct_fields

NAME = "UpsampleNearest"
INPUTS = ("X",)
OUTPUTS = ("Y",)


class Params(ctypes.Structure):
    """struct UpsampleNearestParams of op.h."""

    _fields_ = struct_fields(
        (INT32, "dtype"),
        (POINTER, "x y"),
        (INT64, "rows width channels scale_height scale_width"),
    )


def params(case: OperatorCase, dtype: str, address: Mapping[str, int]) -> Params:
    """Return the Params of a case."""
    batch, height, width, channels = case.inputs["X"]
    return Params(
        dtype=DTYPES[dtype][0],
        x=address["X"],
        y=address["Y"],
        rows=batch * height,
        width=width,
        channels=channels,
        scale_height=int(case.attributes["scale_height"]),
        scale_width=int(case.attributes["scale_width"]),
    )


def output_shapes(case: OperatorCase) -> dict[str, Shape]:
    """Y has the shape of X, its height and width times the scales."""
    batch, height, width, channels = case.inputs["X"]
    down, across = int(case.attributes["scale_height"]), int(case.attributes["scale_width"])
    return {"Y": (batch, height * down, width * across, channels)}


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """X (N, H, W, C) -> Y (N, H * scale_height, W * scale_width, C) in float64."""
    x = inputs["X"].astype(np.float64)
    taller = np.repeat(x, int(attributes["scale_height"]), axis=1)
    return {"Y": np.repeat(taller, int(attributes["scale_width"]), axis=2)}


def _case(
    *shape: int, scales: tuple[int, int] = (2, 2), distribution: str = "normal", benchmark: bool = False
) -> OperatorCase:
    """X of `shape` (N, H, W, C)."""
    down, across = scales
    name = "x".join(map(str, shape)) + f"-s{down}x{across}-{distribution}"
    attributes: dict[str, int | float] = {"scale_height": down, "scale_width": across}
    return OperatorCase(name, {"X": shape}, attributes, distribution=distribution, benchmark=benchmark)


CASES = [
    _case(1, 1, 1, 1),
    _case(2, 8, 8, 64),
    _case(1, 5, 7, 33),
    _case(2, 4, 3, 6),
    _case(1, 6, 5, 12),
    _case(3, 3, 11, 1),
    _case(1, 4, 5, 40, scales=(1, 1)),
    _case(2, 5, 4, 24, scales=(3, 3)),
    _case(1, 7, 3, 16, scales=(1, 3)),
    _case(1, 3, 9, 7, scales=(4, 1)),
    _case(0, 4, 4, 8),
    _case(2, 0, 4, 8),
    _case(1, 8, 6, 32, distribution="large"),
    _case(1, 8, 6, 32, distribution="tiny"),
    _case(1, 64, 64, 512, benchmark=True),
    _case(1, 128, 128, 512, benchmark=True),
    _case(1, 256, 256, 256, benchmark=True),
    _case(2, 32, 32, 640, benchmark=True),
    _case(2, 16, 16, 1280, benchmark=True),
    _case(2, 8, 8, 1280, benchmark=True),
]
