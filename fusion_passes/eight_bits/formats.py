"""8-bit formats with symmetric scales: value = scale * element.

Scales are float16 numbers, so a graph in half precision computes with the same scales as one in float32. Elements have
no negative zero: its bits are NaN in the e4m3 of AMD's gfx942 (FNUZ).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

SMALLEST_SCALE = 2.0**-24  # of float16


@dataclass(frozen=True)
class EightBitFormat:
    """An element type of 8 bits.

    Attributes:
        onnx_dtype: Name in `onnx.TensorProto.DataType`.
        dtype: NumPy's dtype.
        limit: Largest element that is used.
    """

    name: str
    onnx_dtype: str
    dtype: np.dtype
    limit: float

    def scale(self, largest: np.ndarray | float) -> np.ndarray:
        """Return scales for the largest magnitudes, rounded up to float16; float32. The scale of 0 is 1.

        Raises ValueError for magnitudes whose scale float16 does not represent.
        """
        exact = np.asarray(largest, np.float32) / np.float32(self.limit)
        if not (exact <= float(np.finfo(np.float16).max)).all():
            raise ValueError(f"a magnitude of {float(np.max(largest)):g} is too large for 8 bits")
        half = exact.astype(np.float16)
        half = np.where(half.astype(np.float32) < exact, np.nextafter(half, np.float16(np.inf)), half)
        return np.where(exact > 0, np.maximum(half.astype(np.float32), SMALLEST_SCALE), np.float32(1))

    def quantize(self, values: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """Return the elements of float32 `values`, rounded to nearest even and saturated."""
        scaled = (values / scale).clip(-self.limit, self.limit)
        rounded = np.rint(scaled) if self.dtype == np.int8 else scaled.astype(self.dtype).astype(np.float32)
        return (rounded + np.float32(0)).astype(self.dtype)  # -0 + 0 is 0


FORMATS: Mapping[str, EightBitFormat] = {
    each.name: each
    for each in (
        EightBitFormat("float8", "FLOAT8E4M3FN", np.dtype(ml_dtypes.float8_e4m3fn), 448.0),
        EightBitFormat("int8", "INT8", np.dtype(np.int8), 127.0),
    )
}


def channel_scale(argument: tuple[str, int | None, float], weight: np.ndarray) -> np.ndarray:
    """Return the quantization scale of a weight, float32: one per output channel (channels,), or one for all ().

    argument: [name of the format, axis of the output channels or null for one scale, factor on the scales].
    """
    name, axis, factor = argument
    others = None if axis is None else tuple(each for each in range(weight.ndim) if each != axis)
    largest = np.abs(weight.astype(np.float32, copy=False)).max(axis=others, initial=0.0)
    return np.asarray(FORMATS[name].scale(largest) * np.float32(factor))


def quantize_weight(argument: tuple[str, int | None], weight: np.ndarray) -> np.ndarray:
    """Return a weight in 8 bits by the scales of `channel_scale`. argument: [name of the format, axis or null]."""
    name, axis = argument
    scale = channel_scale((name, axis, 1.0), weight)
    if axis is not None:
        scale = scale.reshape([-1 if each == axis else 1 for each in range(weight.ndim)])
    return FORMATS[name].quantize(weight.astype(np.float32, copy=False), scale)
