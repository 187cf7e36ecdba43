"""Tiling and slicing of a VAE: overlapping, blended tiles of large images, or one image of a batch after the other.

Neighboring tiles share a quarter of their side; across the shared strip one fades linearly into the other. Sizes and
blending are those of diffusers' `enable_tiling`, so the image is the same.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

OVERLAP = 0.25
# A VAE half: (B, C, H, W) -> (B, C', s*H, s*W), s = 8 for the decoder and 1/8 for the encoder.
Run = Callable[[np.ndarray], np.ndarray]


def run_in_tiles(run: Run, x: np.ndarray, tile: int, tile_out: int) -> np.ndarray:
    """Apply `run` to tiles of `tile` x `tile` pixels of x (B, C, H, W); its outputs are `tile_out` x `tile_out`.

    Returns (B, C', H', W') float32 with H' = H * tile_out / tile. In memory at once are one row
    of tiles and the last lines of the row above. An `x` no larger than a tile is run at once.
    """
    height, width = x.shape[2:]
    if height <= tile and width <= tile:
        return run(x)
    stride = int(tile * (1 - OVERLAP))
    overlap = int(tile_out * OVERLAP)
    step = tile_out - overlap
    result: np.ndarray | None = None
    above: list[np.ndarray] = []
    for row, top in enumerate(range(0, height, stride)):
        lower: list[np.ndarray] = []
        left: np.ndarray | None = None
        for column, start in enumerate(range(0, width, stride)):
            part = np.array(run(x[:, :, top : top + tile, start : start + tile]), np.float32)
            if above:
                blend_overlap(above[column], part, overlap, axis=2)
            if left is not None:
                blend_overlap(left, part, overlap, axis=3)
            if result is None:
                batch, channels = part.shape[:2]
                result = np.empty((batch, channels, height * tile_out // tile, width * tile_out // tile), np.float32)
            y, x_out = row * step, column * step
            target = result[:, :, y : y + step, x_out : x_out + step]
            target[...] = part[:, :, : target.shape[2], : target.shape[3]]
            lower.append(part[:, :, -overlap:].copy())
            left = part[:, :, :, -overlap:]
        above = lower
    assert result is not None
    return result


def blend_overlap(before: np.ndarray, after: np.ndarray, overlap: int, axis: int) -> None:
    """Let the last `overlap` lines of `before` along `axis` fade into the first lines of `after`, in place."""
    extent = min(before.shape[axis], after.shape[axis], overlap)
    shape = [1, 1, 1, 1]
    shape[axis] = extent
    weight = (np.arange(extent, dtype=np.float32) / extent).reshape(shape)
    first, last = [slice(None)] * 4, [slice(None)] * 4
    first[axis], last[axis] = slice(0, extent), slice(before.shape[axis] - extent, None)
    after[tuple(first)] = before[tuple(last)] * (1 - weight) + after[tuple(first)] * weight


def run_one_by_one(run: Run, x: np.ndarray) -> np.ndarray:
    """Apply `run` to one image of x (B, C, H, W) after the other."""
    return np.concatenate([run(x[i : i + 1]) for i in range(len(x))])
