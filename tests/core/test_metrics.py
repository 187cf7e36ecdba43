"""Errors between images and between arrays."""

from __future__ import annotations

import numpy as np
import pytest

from sd_ort.core import metrics


def test_psnr() -> None:
    black, gray = np.zeros((4, 4, 3), np.uint8), np.full((4, 4, 3), 51, np.uint8)
    assert metrics.psnr(gray, black) == pytest.approx(20 * np.log10(5))
    assert metrics.psnr(black, black) == metrics.EQUAL_DB
    with pytest.raises(ValueError, match="cannot be compared"):
        metrics.psnr(black, black[:2])
    assert metrics.psnr(gray / 255, black / 255, peak=1.0) == pytest.approx(20 * np.log10(5))
    assert np.isnan(metrics.psnr(np.full(3, np.nan), np.zeros(3)))
    with pytest.raises(ValueError, match="flat"):
        metrics.psnr(black, gray, min_std=10)


def test_array_errors() -> None:
    ones = np.ones((2, 2), np.float32)
    assert metrics.relative_l2_error(1.01 * ones, ones) == pytest.approx(0.01)
    assert (metrics.relative_l2_error(ones, 0 * ones), metrics.relative_l2_error(0 * ones, 0 * ones)) == (np.inf, 0)
    assert metrics.array_errors(ones[:1], ones) == {
        "shape": [1, 2], "finite": False, "source_finite": True,
        "relative_error": np.inf, "nmse": np.inf, "max_abs": np.inf,
    }  # fmt: skip
