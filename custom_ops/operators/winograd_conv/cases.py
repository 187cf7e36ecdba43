"""Params, NumPy reference and test cases of WinogradConv, which has no GPU kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np

from custom_ops.operator_spec import DTYPES, INT32, INT64, POINTER, Array, OperatorCase, Shape, struct_fields

NAME = "WinogradConv"
INPUTS = ("X", "W", "B")
OUTPUTS = ("Y",)


class Params(ctypes.Structure):
    """struct WinogradConvParams of op.h."""

    _fields_ = struct_fields(
        (INT32, "dtype"),
        (POINTER, "x filters bias y"),
        (INT64, "batch channels height width filter_count"),
    )


def params(case: OperatorCase, dtype: str, address: Mapping[str, int]) -> Params:
    """Return the Params of a case."""
    pointers = (address[name] for name in ("X", "W", "B", "Y"))
    return Params(DTYPES[dtype][0], *pointers, *case.inputs["X"], case.inputs["B"][0])


def output_shapes(case: OperatorCase) -> dict[str, Shape]:
    """Y has the shape of X with a channel for each filter."""
    n, _, h, w = case.inputs["X"]
    return {"Y": (n, case.inputs["B"][0], h, w)}


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """X (N, C, H, W), W (M, C, 3, 3), B (M) -> Y (N, M, H, W)."""
    x, w, b = (inputs[name].astype(np.float64) for name in ("X", "W", "B"))
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    return {"Y": np.einsum("nchwij,mcij->nmhw", windows, w, optimize=True) + b[:, None, None]}


def generate_special_input(case: OperatorCase, name: str, rng: np.random.Generator) -> Array | None:
    """Generate filters that keep the magnitude of the input; also for malformed shapes."""
    if name != "W":
        return None
    shape = case.inputs["W"]
    return rng.standard_normal(shape) / np.sqrt(9 * max((*shape, 1, 1)[1], 1))


def _case(n: int, c: int, h: int, w: int, m: int, distribution: str = "normal") -> OperatorCase:
    shapes = {"X": (n, c, h, w), "W": (m, c, 3, 3), "B": (m,)}
    return OperatorCase(
        f"{n}x{c}x{h}x{w}-m{m}-{distribution}",
        shapes,
        distribution=distribution,
        dtypes=("float32", "float16"),
        # Winograd's sums cancel: 3 times the error of a direct sum at 320 channels, which grows with their number.
        float32_roundoffs=32,
    )


# Edges that no tile divides, of one pixel, of more tiles than a block has; channels and filters that no vector
# divides; several blocks of input channels, several images in a block.
CASES = [
    _case(1, 1, 1, 1, 1),
    _case(1, 5, 7, 9, 3),
    _case(2, 16, 4, 4, 16),
    _case(3, 70, 6, 10, 20),
    _case(1, 33, 13, 1, 40),
    _case(1, 8, 130, 8, 8),
    _case(1, 16, 5, 700, 8),
    _case(2, 320, 16, 16, 64),
    _case(1, 129, 8, 24, 33),
    _case(0, 8, 4, 4, 8),
    *(_case(1, 24, 9, 8, 40, distribution) for distribution in ("large", "tiny", "constant")),
]
