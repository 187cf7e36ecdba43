"""Reader of image files, with limits of format, file size and side length."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image

from sd_ort.core.files import parsing, read_regular

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
FILE_LIMIT = 1 << 28  # bytes
SIDE_LIMIT = 16_384  # pixels


def read_image(path: Path, root: Path | None = None) -> Image.Image:
    """Return the image in a file as RGB; the file lies in the folder `root`, if that is given.

    Raises InputError for a file that is no image, or a side of more than SIDE_LIMIT pixels.
    """
    with (
        parsing(path, "an image"),
        Image.open(io.BytesIO(read_regular(path, root, FILE_LIMIT)), formats=FORMATS) as file,
    ):
        if max(file.size) > SIDE_LIMIT:
            raise ValueError(f"more than {SIDE_LIMIT} pixels a side")
        return file.convert("RGB")
