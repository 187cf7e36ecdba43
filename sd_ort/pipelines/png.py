"""A drawn picture as a PNG file that says how it was drawn."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

from PIL import Image, PngImagePlugin

from sd_ort.core.errors import InputError
from sd_ort.core.files import check_regular, parsing


def png_bytes(image: Image.Image, text: Mapping[str, str]) -> bytes:
    """The file; `text` becomes its PNG text, in UTF-8."""
    info = PngImagePlugin.PngInfo()
    info.add_text("Software", "sd-ort")
    for key, value in text.items():
        info.add_itxt(key, value)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", pnginfo=info)
    return buffer.getvalue()


def read_png_text(path: Path) -> dict[str, str]:
    """The text of a PNG file; {} for a file that is none."""
    try:
        with parsing(path, "a picture"), Image.open(check_regular(path), formats=["PNG"]) as image:
            text = getattr(image, "text", {})
    except InputError:
        return {}
    return {str(key): str(value) for key, value in text.items()}
