"""Params, NumPy reference and test cases of Bfloat16Conv, which has no GPU kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from math import prod

import ml_dtypes
import numpy as np

from custom_ops.operator_spec import DTYPES, INT32, INT64, POINTER, Array, OperatorCase, Shape, struct_fields

NAME = "Bfloat16Conv"
INPUTS = ("X", "W", "B")
OUTPUTS = ("Y",)
ATTRIBUTES = {"stride": 1, "x_last": 0, "y_last": 0}


class Params(ctypes.Structure):
    """struct Bfloat16ConvParams of op.h."""

    _fields_ = struct_fields(
        (INT32, "dtype weight_dtype"),
        (POINTER, "x filters bias y"),
        (INT64, "batch channels height width filter_count edge stride"),
        (INT32, "x_last y_last"),
        (POINTER, "packed_weights packed scale"),
        (INT32, "scales"),
    )


def params(case: OperatorCase, dtype: str, address: Mapping[str, int]) -> Params:
    """Return the Params of a case."""
    number, (filters, _, edge, _) = DTYPES[dtype][0], case.inputs["W"]
    pointers = (address["X"], address["W"], address.get("B", 0), address["Y"])
    stride, x_last, y_last = (int(case.attributes.get(name, absent)) for name, absent in ATTRIBUTES.items())
    return Params(number, number, *pointers, *_sizes(case), filters, edge, stride, x_last, y_last)


def _sizes(case: OperatorCase) -> Shape:
    """(N, C, H, W)"""
    n, *sizes = case.inputs["X"]
    return (n, sizes[2], *sizes[:2]) if case.attributes.get("x_last", 0) else (n, *sizes)


def output_shapes(case: OperatorCase) -> dict[str, Shape]:
    """Y has the shape of X, or every second line and column of it, with a channel for each filter."""
    (n, _, h, w), stride = _sizes(case), int(case.attributes.get("stride", 1))
    filters, image = case.inputs["W"][0], (-(-h // stride), -(-w // stride))
    return {"Y": (n, *image, filters) if case.attributes.get("y_last", 0) else (n, filters, *image)}


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """X (N, C, H, W), W (M, C, k, k), B (M) -> Y (N, M, ceil(H / stride), ceil(W / stride)); X or Y channels last."""
    x, w = (inputs[name].astype(ml_dtypes.bfloat16).astype(np.float64) for name in ("X", "W"))
    return {"Y": convolve(x, w, inputs.get("B"), attributes)}


def convolve(
    x: Array, w: Array, bias: Array | None, attributes: Mapping[str, int | float], scale: Array | None = None
) -> Array:
    """Return Y of float64 elements, with the sums times `scale` (1) or (M)."""
    if attributes.get("x_last", 0):
        x = x.transpose(0, 3, 1, 2)
    edge = w.shape[2]
    frame = (edge // 2, edge // 2)
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(x, ((0, 0), (0, 0), frame, frame)), (edge, edge), (2, 3))
    stride = int(attributes.get("stride", 1))
    windows = windows[:, :, ::stride, ::stride]
    y = np.einsum("nchwij,mcij->nmhw", windows, w, optimize=True)
    if scale is not None:
        y *= scale.astype(np.float64)[:, None, None]
    if bias is not None:
        y += bias.astype(np.float64)[:, None, None]
    return y.transpose(0, 2, 3, 1) if attributes.get("y_last", 0) else y


def generate_special_input(case: OperatorCase, name: str, rng: np.random.Generator) -> Array | None:
    """Generate filters that keep the magnitude of the input."""
    if name != "W":
        return None
    shape = case.inputs["W"]
    return rng.standard_normal(shape) / np.sqrt(max(1, prod(shape[1:])))


def _case(
    n: int,
    c: int,
    h: int,
    w: int,
    m: int,
    edge: int = 3,
    bias: bool = True,
    distribution: str = "normal",
    **attributes: int,
) -> OperatorCase:
    x = (n, h, w, c) if attributes.get("x_last") else (n, c, h, w)
    shapes = {"X": x, "W": (m, c, edge, edge), **({"B": (m,)} if bias else {})}
    name = f"{n}x{c}x{h}x{w}-m{m}-k{edge}-b{bias:d}-{distribution}" + "".join(f"-{a}{i}" for a, i in attributes.items())
    return OperatorCase(
        name,
        shapes,
        dict(attributes),
        distribution=distribution,
        dtypes=("float32",),
        float32_roundoffs=8 + edge * c**0.5,
    )


# Sizes that no tile, block or vector divides; lines longer and shorter than a block of rows; several images and tasks.
CASES = [
    _case(1, 1, 1, 1, 1),
    _case(1, 5, 7, 9, 3),
    _case(2, 33, 5, 17, 17, bias=False),
    _case(2, 40, 4, 4, 70),
    _case(1, 64, 3, 50, 33),
    _case(3, 36, 5, 20, 40, edge=1),
    _case(2, 32, 8, 8, 32, edge=1, bias=False),
    _case(1, 32, 40, 40, 48),
    _case(0, 8, 4, 4, 8),
    _case(1, 3, 1, 1, 2, stride=2),
    _case(2, 40, 9, 16, 33, stride=2),
    _case(1, 33, 12, 35, 48, stride=2, bias=False),
    _case(2, 36, 7, 8, 20, edge=1, stride=2),
    _case(2, 36, 7, 9, 43, edge=1, x_last=1),
    _case(2, 40, 5, 9, 43, edge=1, y_last=1),
    _case(1, 64, 6, 9, 70, edge=1, bias=False, x_last=1, y_last=1),
    *(_case(1, 24, 9, 8, 40, distribution=distribution) for distribution in ("large", "constant")),
]
