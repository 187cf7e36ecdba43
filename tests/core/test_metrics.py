"""The metrics of images."""

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
