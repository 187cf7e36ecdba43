"""The optional safety checker of Stable Diffusion 1.x, as Optimum exports it: flagged images come out black.

A folder that has a component `safety_checker` (inputs `clip_input` (B, 3, 224, 224) and `images` (B, H, W, 3), outputs
`out_images` and `has_nsfw_concepts` (B)) is checked by it; a folder without one is not. `sd-ort export` leaves it out.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sd_ort.pipelines.images import clip_pixels, feature_extractor, pil_images
from sd_ort.runtime.session import OrtModel

SIZE = 224  # pixels a side of clip_input, if the folder does not name them


def check(model: OrtModel, folder: Path, images: np.ndarray) -> tuple[np.ndarray, list[bool]]:
    """Return the images (B, H, W, 3), float32, 0..1, with the flagged ones black, and the flags."""
    config = feature_extractor(folder)
    size = config.get("crop_size", SIZE)
    size = size["height"] if isinstance(size, dict) else size
    converted = pil_images((images * 255).round().astype(np.uint8))
    clip = np.stack([clip_pixels(image, size, config) for image in converted])
    outputs = model(clip_input=clip, images=images)
    flagged = [bool(flag) for flag in np.ravel(outputs["has_nsfw_concepts"])]
    black = np.array(flagged).reshape(-1, 1, 1, 1)
    return np.where(black, np.float32(0), images), flagged
