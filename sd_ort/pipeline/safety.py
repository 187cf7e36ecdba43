"""The optional safety checker of Stable Diffusion 1.x, as Optimum exports it: flagged images come out black.

A folder that has a component `safety_checker` (inputs `clip_input` (B, 3, 224, 224) and `images` (B, H, W, 3), outputs
`out_images` and `has_nsfw_concepts` (B)) is checked by it; a folder without one is not. `sd-ort export` leaves it out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from sd_ort.core.files import read_json
from sd_ort.runtime.session import Model

# CLIP's preprocessing, for a folder without feature_extractor/preprocessor_config.json.
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
SIZE = 224


def check(model: Model, folder: Path, images: np.ndarray) -> tuple[np.ndarray, list[bool]]:
    """(images with the flagged ones black, which were flagged); images (B, H, W, 3), float32, 0..1."""
    clip = np.stack([preprocess(image, _config(folder)) for image in images])
    outputs = model(clip_input=clip, images=images)
    flagged = [bool(flag) for flag in np.ravel(outputs["has_nsfw_concepts"])]
    black = np.array(flagged).reshape(-1, 1, 1, 1)
    return np.where(black, np.float32(0), images), flagged


def preprocess(image: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """What CLIP sees of an image (H, W, 3) in 0..1: its central square at 224², normalized, (3, 224, 224)."""
    size = config.get("crop_size", SIZE)
    size = size["height"] if isinstance(size, dict) else size
    picture = Image.fromarray((image * 255).round().astype(np.uint8))
    scale = size / min(picture.size)
    picture = picture.resize([max(size, round(s * scale)) for s in picture.size], Image.Resampling.BICUBIC)
    left, top = ((s - size) // 2 for s in picture.size)
    pixels = np.asarray(picture.crop((left, top, left + size, top + size)), np.float32) / 255
    normalized = (pixels - config.get("image_mean", MEAN)) / config.get("image_std", STD)
    return normalized.transpose(2, 0, 1).astype(np.float32)


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "feature_extractor" / "preprocessor_config.json"
    return read_json(path) if path.is_file() else {}
