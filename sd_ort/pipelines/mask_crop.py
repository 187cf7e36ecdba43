"""Inpainting around a mask at a higher resolution: crop the region of the mask, and lay the result over the image.

Regions and pixels equal those of diffusers' VaeImageProcessor, whose import takes seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sd_ort.core.errors import InputError

if TYPE_CHECKING:
    from PIL import Image

Region = tuple[int, int, int, int]  # left, top, right, bottom


def crop_region(mask: Image.Image, width: int, height: int, padding: int) -> Region:
    """Return the region of a mask's pixels above 0 with `padding`, widened to the aspect ratio of width and height.

    Raises InputError for a mask without such pixels.
    """
    masked = np.asarray(mask.convert("L")) > 0
    if not masked.any():
        raise InputError("padding_mask_crop: the mask has no pixel above 0, so there is no region to crop.")
    (left, right), (top, bottom) = (
        (max(int(at.min()) - padding, 0), min(int(at.max()) + 1 + padding, size))
        for at, size in zip(np.nonzero(masked)[::-1], mask.size, strict=True)
    )
    ratio = width / height
    if (right - left) / (bottom - top) > ratio:
        top, bottom = _widened(top, bottom, (right - left) / ratio, mask.height)
    else:
        left, right = _widened(left, right, (bottom - top) * ratio, mask.width)
    return left, top, right, bottom


def _widened(start: int, stop: int, length: float, limit: int) -> tuple[int, int]:
    """Return a range of `length` around start and stop, moved into 0 to `limit`, and cut off there if it is longer."""
    more = int(length - (stop - start))
    size = stop - start + more
    start = max(min(start - more // 2, limit - size), 0)
    return start, min(start + size, limit)


def fill(image: Image.Image, region: Region, width: int, height: int) -> Image.Image:
    """Return the region of an image in RGB, resized to fit into width and height; its edges fill the borders."""
    from PIL import Image

    part = image.crop(region)
    wide = part.width / part.height > width / height
    size = (width, part.height * width // part.width) if wide else (part.width * height // part.height, height)
    sized = part.resize(size, Image.Resampling.LANCZOS)
    left, top = width // 2 - size[0] // 2, height // 2 - size[1] // 2
    filled = Image.new("RGB", (width, height))
    filled.paste(sized, (left, top))
    if top > 0:
        filled.paste(sized.resize((width, top), box=(0, 0, width, 0)), (0, 0))
        filled.paste(sized.resize((width, top), box=(0, size[1], width, size[1])), (0, top + size[1]))
    if left > 0:
        filled.paste(sized.resize((left, height), box=(0, 0, 0, height)), (0, 0))
        filled.paste(sized.resize((left, height), box=(size[0], 0, size[0], height)), (left + size[0], 0))
    return filled


def overlay(mask: Image.Image, image: Image.Image, patch: Image.Image, region: Region) -> Image.Image:
    """Return an image in RGB with the generated `patch` in its region, seen as far as the mask is white."""
    from PIL import Image, ImageOps

    width, height = region[2] - region[0], region[3] - region[1]
    wide = patch.width / patch.height >= width / height
    size = (patch.width * height // patch.height, height) if wide else (width, patch.height * width // patch.width)
    sized = Image.new("RGB", (width, height))
    sized.paste(patch.resize(size, Image.Resampling.LANCZOS), (width // 2 - size[0] // 2, height // 2 - size[1] // 2))
    result = Image.new("RGBA", image.size)
    result.paste(sized, region[:2])
    result = result.convert("RGB").convert("RGBA")  # opaque
    unmasked = Image.new("RGBa", image.size)
    unmasked.paste(image.convert("RGBA").convert("RGBa"), mask=ImageOps.invert(mask.convert("L")))
    result.alpha_composite(unmasked.convert("RGBA"))
    return result.convert("RGB")
