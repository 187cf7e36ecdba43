"""What can be asked of a pipeline, whatever the model: checked before anything is loaded or drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sd_ort.core.errors import InputError

SIDE_LIMIT = 16_384  # pixels of an image's side
IMAGES_LIMIT = 4096  # images of one call
SEEDS = range(-(1 << 63), 1 << 64)  # torch's


def check_text(texts: Sequence[object]) -> None:
    """Raise InputError for a prompt that is no text, such as bytes that a terminal could not decode."""
    for text in texts:
        if not isinstance(text, str):
            raise InputError(f"a prompt is a text, or a list of them, not {type(text).__name__}.")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError("the prompt holds characters that are no text: write it in UTF-8.") from error


def check_numbers(height: int | None, width: int | None, images: int, **scales: float | None) -> None:
    """Raise InputError for sizes in pixels, numbers of images and scales that no model can draw with."""
    for name, side in (("height", height), ("width", width)):
        if side is not None and not 1 <= side <= SIDE_LIMIT:
            raise InputError(f"{name} {side} is not between 1 and {SIDE_LIMIT} pixels.")
    if not 1 <= images <= IMAGES_LIMIT:
        raise InputError(f"{images} images are not between 1 and {IMAGES_LIMIT}: draw them in several calls.")
    for name, scale in scales.items():
        if scale is not None and not math.isfinite(scale):
            raise InputError(f"{name} {scale} is no number to draw with: give one such as 7.5.")


def check_seeds(first: int, count: int) -> None:
    """Raise InputError for seeds that torch's generators do not take."""
    last = first + count - 1
    if first not in SEEDS or last not in SEEDS:
        raise InputError(f"seeds from {first} to {last} are not between {SEEDS[0]} and {SEEDS[-1]}.")
