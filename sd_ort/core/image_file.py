"""Reader of image files, with limits of format, file size and side length."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from sd_ort.core.files import parsing, read_regular

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
FILE_LIMIT = 1 << 28  # bytes
SIDE_LIMIT = 16_384  # pixels


def read_image(path: Path, root: Path | None = None) -> Image.Image:
    """Return the image in a file as RGB, turned as its EXIF says; the file lies in the folder `root`, if that is given.

    Greyscale of 16 bits keeps its upper 8, as PIL does for colors of 16 bits. Raises InputError for a file that is no
    image, one of 32 bits, whose range is unknown, or a side of more than SIDE_LIMIT pixels.
    """
    with parsing(path, "an image"):
        try:
            file = Image.open(io.BytesIO(read_regular(path, root, FILE_LIMIT)), formats=FORMATS)
        except UnidentifiedImageError as error:
            raise ValueError(f"it is none of {', '.join(FORMATS)}") from error
        with file:
            if max(file.size) > SIDE_LIMIT:
                raise ValueError(f"more than {SIDE_LIMIT} pixels a side")
            if file.mode in ("I", "F"):
                raise ValueError("its pixels have 32 bits, not 8 or 16")
            upright = ImageOps.exif_transpose(file)
            if upright.mode.startswith("I;16"):
                upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
            return upright.convert("RGB")
