"""Stored weights by NumPy: the inputs of DequantizeLinear, and its output."""

from __future__ import annotations

from typing import Any

import numpy as np

from fusion_passes.quantized_weights import StoredArgument, stored


def stored_parts(argument: StoredArgument, weight: np.ndarray, dtype: Any = np.float32) -> list[np.ndarray]:
    """Return elements, scales of `dtype` and, if asymmetric, zero points of a weight."""
    quantization = stored(argument)
    parts = [quantization.elements(weight), quantization.scales(weight).astype(dtype)]
    return parts if argument[3] else [*parts, quantization.zero_points(weight)]


def dequantize(argument: StoredArgument, parts: list[np.ndarray]) -> np.ndarray:
    """Return the output of DequantizeLinear by the definition of ONNX, in float32."""
    _, axis, block, _ = argument
    elements, *others = (part.astype(np.float32) for part in parts)
    scales, zeros = (
        np.repeat(part, block, axis) if block else part.reshape([-1 if i == axis else 1 for i in range(elements.ndim)])
        for part in (others if len(others) == 2 else (others[0], np.zeros_like(others[0])))
    )
    return (elements - zeros) * scales
