"""Params, NumPy reference, test cases and benchmark shapes (convolutions of Stable Diffusion) of NhwcWinograd."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np

from custom_ops.operator_spec import DTYPES, INT32, INT64, POINTER, Array, OperatorCase, Shape, struct_fields
from custom_ops.operators.winograd_filters.cases import reference as winograd_filters

NAME = "NhwcWinograd"
INPUTS = ("X", "W", "B", "skip")
OUTPUTS = ("Y",)


class Params(ctypes.Structure):
    """struct NhwcWinogradParams of op.h."""

    _fields_ = struct_fields(
        (INT32, "dtype"),
        (POINTER, "x filters bias skip y"),
        (INT64, "batch height width channels filter_count upsampled"),
    )


def params(case: OperatorCase, dtype: str, address: Mapping[str, int]) -> Params:
    """Return the Params of a case."""
    pointers = (address.get(name, 0) for name in ("X", "W", "B", "skip", "Y"))
    return Params(DTYPES[dtype][0], *pointers, *case.inputs["X"], case.inputs["W"][1], _upsampled(case))


def output_shapes(case: OperatorCase) -> dict[str, Shape]:
    """Y has the shape of X, or of X upsampled, with a channel for each filter."""
    n, h, w, _ = case.inputs["X"]
    times = 1 + _upsampled(case)
    return {"Y": (n, times * h, times * w, case.inputs["W"][1])}


# Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", arXiv 1509.09308, section 4.1.
B = np.array([[1, 0, 0, 0], [0, 1, -1, 1], [-1, 1, 1, 0], [0, 0, 0, -1]])
A = np.array([[1, 0], [1, 1], [1, -1], [0, -1]])


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """X (N, H, W, C), W (16, M, C) of WinogradFilters, B (M), skip -> Y (N, H, W, M).

    With attribute `upsampled`, X is repeated down and across first, and W is (9, M, C).
    """
    x, filters = (inputs[name].astype(np.float64) for name in ("X", "W"))
    rows_used = [0, 1, 2, 3]
    if attributes.get("upsampled"):
        x, rows_used = x.repeat(2, axis=1).repeat(2, axis=2), [0, 1, 3]
    b, a, side = B[:, rows_used], A[rows_used], len(rows_used)
    n, h, w, c = x.shape
    rows, columns = (h + 1) // 2, (w + 1) // 2
    padded = np.pad(x, ((0, 0), (1, 2 * rows - h + 1), (1, 2 * columns - w + 1), (0, 0)))
    tiles = np.lib.stride_tricks.sliding_window_view(padded, (4, 4), axis=(1, 2))[:, ::2, ::2]
    transformed = np.einsum("ia,nrscij,jb->nrsabc", b, tiles, b, optimize=True)
    products = np.einsum(
        "nrsabc,abmc->nrsabm", transformed, filters.reshape(side, side, filters.shape[1], c), optimize=True
    )
    tiles = np.einsum("ai,nrsabm,bj->nrisjm", a, products, a, optimize=True)
    y = tiles.reshape(n, 2 * rows, 2 * columns, filters.shape[1])[:, :h, :w]
    for name in ("B", "skip"):
        y = y + inputs[name].astype(np.float64) if name in inputs else y
    return {"Y": y}


def _upsampled(case: OperatorCase) -> int:
    return int(case.attributes.get("upsampled", 0))


def generate_special_input(case: OperatorCase, name: str, rng: np.random.Generator) -> Array | None:
    """Generate filters that keep the magnitude of the input, transformed."""
    if name != "W":
        return None
    _, filters, channels = case.inputs["W"]
    weight = rng.standard_normal((filters, 3, 3, channels)) / np.sqrt(9 * max(channels, 1))
    return winograd_filters({"weight": weight}, case.attributes)["Y"]


def _case(
    *image: int,
    m: int,
    bias: bool = True,
    skip: bool = False,
    upsampled: bool = False,
    distribution: str = "normal",
    benchmark: bool = False,
) -> OperatorCase:
    """X of (N, H, W, C), and m filters."""
    inputs: dict[str, Shape] = {"X": image, "W": (9 if upsampled else 16, m, image[3])}
    if bias:
        inputs["B"] = (m,)
    case = OperatorCase(
        f"{'x'.join(map(str, image))}-m{m}-b{bias:d}-s{skip:d}-d{upsampled:d}-{distribution}",
        inputs,
        {"upsampled": int(upsampled)},
        distribution=distribution,
        benchmark=benchmark,
        # sums that cancel, as WinogradConv's, which grow with the channels
        float32_roundoffs=4 + 4 * image[3] ** 0.5,
    )
    if skip:
        case.inputs["skip"] = output_shapes(case)["Y"]
    return case


# One pixel, odd sizes on both axes, several images, channels and filters that no vector and no tile divides.
CASES = [
    _case(1, 1, 1, 1, m=1),
    _case(1, 5, 7, 3, m=5, bias=False),
    _case(2, 6, 5, 4, m=20, skip=True),
    _case(1, 8, 8, 40, m=72),
    _case(3, 4, 3, 70, m=33, skip=True),
    _case(2, 9, 8, 64, m=16, bias=False, skip=True),
    _case(0, 4, 4, 8, m=8),
    _case(1, 3, 3, 8, m=0),
    *(_case(1, 6, 7, 24, m=16, skip=True, distribution=distribution) for distribution in ("large", "tiny", "constant")),
    _case(1, 1, 1, 8, m=4, upsampled=True),
    _case(2, 5, 3, 40, m=33, upsampled=True, skip=True),
    _case(1, 3, 4, 6, m=8, upsampled=True),
    _case(1, 4, 6, 64, m=20, upsampled=True, bias=False),
    _case(2, 32, 32, 1280, m=1280, upsampled=True, benchmark=True),
    _case(2, 64, 64, 640, m=640, upsampled=True, benchmark=True),
    _case(2, 32, 32, 1280, m=1280, skip=True, benchmark=True),
    _case(2, 32, 32, 2560, m=1280, benchmark=True),
    _case(2, 64, 64, 640, m=640, skip=True, benchmark=True),
    _case(2, 64, 64, 1920, m=640, benchmark=True),
    _case(2, 128, 128, 320, m=320, skip=True, benchmark=True),
    _case(2, 128, 128, 960, m=320, benchmark=True),
    _case(2, 64, 64, 320, m=320, skip=True, benchmark=True),
    _case(2, 32, 32, 640, m=640, skip=True, benchmark=True),
    _case(2, 16, 16, 1280, m=1280, skip=True, benchmark=True),
    _case(2, 8, 8, 1280, m=1280, skip=True, benchmark=True),
    _case(1, 64, 64, 512, m=512, skip=True, benchmark=True),
    _case(1, 128, 128, 512, m=512, skip=True, benchmark=True),
]
