"""Comparing pictures."""

from __future__ import annotations

import numpy as np


def psnr(picture: np.ndarray, reference: np.ndarray, least: float = 0.05) -> float:
    """Peak signal-to-noise ratio in dB of two float pictures in 0..1; 200 when they are equal.

    A flat reference would prove nothing: its standard deviation must be more than `least`.
    """
    assert picture.shape == reference.shape
    assert reference.std() > least, "a flat picture proves nothing"
    return float(-10 * np.log10(np.mean((picture - reference) ** 2) + 1e-20))
