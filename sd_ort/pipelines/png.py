"""PNG files with the arguments of their images as text."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

from PIL import Image, PngImagePlugin

from sd_ort.core.errors import InputError
from sd_ort.core.files import check_regular, parsing


def png_bytes(image: Image.Image, text: Mapping[str, str]) -> bytes:
    """Return the PNG file of an image, with `text` as UTF-8 text chunks."""
    info = PngImagePlugin.PngInfo()
    info.add_text("Software", "sd-ort")
    for key, value in text.items():
        info.add_itxt(key, value)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", pnginfo=info)
    return buffer.getvalue()


def read_png_text(path: Path) -> dict[str, str]:
    """Return the text of a PNG file; {} for another file."""
    try:
        with parsing(path, "a picture"), Image.open(check_regular(path), formats=["PNG"]) as image:
            text = getattr(image, "text", {})
    except InputError:
        return {}
    return {str(key): str(value) for key, value in text.items()}
