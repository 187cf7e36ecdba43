"""scripts/amd/batch_rounding.py: differences of images that are generated alone and in batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scripts.amd.batch_rounding import compare


def test_images_of_a_batch_are_compared_with_those_of_the_same_seed() -> None:
    expected = np.zeros((4, 2, 2, 3), np.int16)

    def draw(seeds: Sequence[int]) -> np.ndarray:
        images = np.stack([np.full((2, 2, 3), seed, np.int16) for seed in seeds])
        images[1:] += 5
        return images

    row = compare(expected, draw)
    assert (row["zero"], row["one"], row["one_in_batch"]) == ("0 (0.000)", "1 (1.000)", "6 (6.000)")
    assert (row["seeds"], row["median"], row["worst"], row["equal"]) == (4, "2 (2.000)", "8 (8.000)", False)
