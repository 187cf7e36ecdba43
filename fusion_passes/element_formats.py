"""Formats of quantized elements in 4 or 8 bits: value = scale * (element - zero point).

Scales are float16 numbers, so a graph in half precision computes with the same scales as one in float32. Elements have
no negative zero: its bits are NaN in the e4m3 of AMD's gfx942 (FNUZ).
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

SMALLEST_SCALE = np.float32(2.0**-24)  # of float16


@dataclass(frozen=True)
class ElementFormat:
    """An element type and the elements that are used: 0 to `limit` with a zero point, else -`limit` to `limit`."""

    name: str
    dtype: np.dtype
    limit: float
    has_zero_point: bool = False

    def scale(self, span: np.ndarray | float, round_up: bool = False) -> np.ndarray:
        """Return float32 scales: `span` divided by the largest element of the format, 1 if `span` is 0.

        Rounded to float16: to nearest, or up, so that no element saturates. Raises ValueError for spans whose scale
        float16 does not represent.
        """
        exact = np.asarray(span, np.float32) / np.float32(self.limit)
        if not (exact <= float(np.finfo(np.float16).max)).all():
            raise ValueError(f"a magnitude of {float(np.max(span)):g} is too large for {self.name}")
        half = exact.astype(np.float16)
        if round_up:
            half = np.where(half.astype(np.float32) < exact, np.nextafter(half, np.float16(np.inf)), half)
        return np.where(exact > 0, np.maximum(half.astype(np.float32), SMALLEST_SCALE), np.float32(1))

    def quantize(self, values: np.ndarray, scale: np.ndarray, zero_point: np.ndarray | float = 0) -> np.ndarray:
        """Return the elements of float32 `values`, rounded to nearest even and saturated."""
        scaled = values / scale
        if self.dtype != ml_dtypes.float8_e4m3fn:
            scaled = np.rint(scaled) + np.float32(zero_point)
        smallest = 0.0 if self.has_zero_point else -self.limit
        elements = scaled.clip(smallest, self.limit).astype(self.dtype).astype(np.float32)
        return (elements + np.float32(0)).astype(self.dtype)  # -0 + 0 is 0


FLOAT8 = ElementFormat("float8", np.dtype(ml_dtypes.float8_e4m3fn), 448.0)
INT8, INT4 = ElementFormat("int8", np.dtype(np.int8), 127.0), ElementFormat("int4", np.dtype(ml_dtypes.int4), 7.0)
UINT8 = ElementFormat("int8", np.dtype(np.uint8), 255.0, has_zero_point=True)
UINT4 = ElementFormat("int4", np.dtype(ml_dtypes.uint4), 15.0, has_zero_point=True)
