"""Summaries of measurements, and errors between images or arrays."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median
from typing import Any

import numpy as np

EQUAL_DB = 120.0  # more than one gray level in one pixel of a 1024 x 1024 image gives (113 dB); JSON has no infinity


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Return median, mean, min and max of `values`, and `values` themselves, in their own unit."""
    return {
        "median": median(values),
        "mean": mean(values),
        "min": min(values),
        "max": max(values),
        "values": list(values),
    }


def psnr(image: np.ndarray, reference: np.ndarray, min_std: float = 0.0, *, peak: float = 255.0) -> float:
    """Return the peak signal-to-noise ratio of two images in dB, at most `EQUAL_DB`.

    Args:
        min_std: smallest standard deviation of `reference`, because a flat image proves nothing.
        peak: range of the pixels: 255 for uint8 images, 1 for float images in 0..1.

    Raises:
        ValueError: if the images have different shapes, or the reference is flatter than `min_std`.
    """
    if image.shape != reference.shape:
        raise ValueError(f"images of shapes {image.shape} and {reference.shape} cannot be compared")
    if reference.std() < min_std:
        raise ValueError(f"a reference of standard deviation {reference.std():.3g} is flat: it proves nothing")
    error = np.mean((image.astype(np.float64) - reference.astype(np.float64)) ** 2)
    return EQUAL_DB if error == 0 else min(float(10 * np.log10(peak**2 / error)), EQUAL_DB)  # NaN stays NaN


def relative_l2_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Return |actual - expected| / |expected| (L2 norms, in float64); infinity if only `expected` is zero."""
    expected = expected.astype(np.float64)
    error, norm = float(np.linalg.norm(actual.astype(np.float64) - expected)), float(np.linalg.norm(expected))
    return error / norm if norm else float("inf") if error else 0.0


def array_errors(actual: np.ndarray, expected: np.ndarray) -> dict[str, Any]:
    """Return shape, finite, source_finite, relative_error (L2), nmse (its square) and max_abs of `actual`.

    A shape other than that of `expected`, or NaN or infinity in either, makes the errors infinite and `finite` False.
    """
    finite, source_finite = bool(np.isfinite(actual).all()), bool(np.isfinite(expected).all())
    comparable = actual.shape == expected.shape and finite and source_finite
    relative = relative_l2_error(actual, expected) if comparable else float("inf")
    difference = np.abs(actual.astype(np.float64) - expected) if comparable else np.array(np.inf)
    return {
        "shape": list(actual.shape),
        "finite": comparable,
        "source_finite": source_finite,
        "relative_error": relative,
        "nmse": relative**2,
        "max_abs": float(difference.max(initial=0)),
    }
