"""PNG files with the arguments of their images as text.

Compression is most of the time of a PNG file: rows are compressed in strips, by as many threads as there are cores
(RFC 1950 and 1951: strips that end at a byte are one stream).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sd_ort.core.errors import InputError
from sd_ort.core.files import check_regular, parsing

if TYPE_CHECKING:
    from PIL import Image

STRIP = 1 << 17  # bytes before compression
LEVEL = 6  # zlib's default
SIGNATURE, RGB = b"\x89PNG\r\n\x1a\n", 2
FIRST_FILTER = 1  # Sub; Up and Average follow


def png_bytes(image: Image.Image, text: Mapping[str, str]) -> bytes:
    """Return the PNG file of an image, as RGB, with `text` as UTF-8 text chunks."""
    pixels = np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
    height, width, _ = pixels.shape
    chunks = [
        _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, RGB, 0, 0, 0)),
        _chunk(b"tEXt", b"Software\0sd-ort"),
        *(_chunk(b"iTXt", f"{key}\0\0\0\0\0{value}".encode()) for key, value in text.items()),
        _chunk(b"IDAT", _compress(_filtered(pixels))),
        _chunk(b"IEND", b""),
    ]
    return SIGNATURE + b"".join(chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _filtered(pixels: np.ndarray) -> bytes:
    """Return the filtered rows of pixels (H, W, 3): of each row the filter with the least sum of absolute values."""
    left, up = np.zeros_like(pixels), np.zeros_like(pixels)
    left[:, 1:], up[1:] = pixels[:, :-1], pixels[:-1]
    average = ((left.astype(np.uint16) + up) >> 1).astype(np.uint8)
    filtered = np.stack([pixels - prediction for prediction in (left, up, average)]).reshape(3, len(pixels), -1)
    best = np.abs(filtered.view(np.int8).astype(np.int16)).sum(2).argmin(0)
    rows = np.hstack([(best + FIRST_FILTER).astype(np.uint8)[:, None], filtered[best, np.arange(len(pixels))]])
    return rows.tobytes()


def _compress(data: bytes) -> bytes:
    """Return a zlib stream."""
    strips = [data[start : start + STRIP] for start in range(0, len(data), STRIP)]

    def deflate(index: int) -> bytes:
        deflater = zlib.compressobj(LEVEL, wbits=-15)
        is_last = index == len(strips) - 1
        return deflater.compress(strips[index]) + deflater.flush(zlib.Z_FINISH if is_last else zlib.Z_FULL_FLUSH)

    with ThreadPoolExecutor() as threads:
        body = b"".join(threads.map(deflate, range(len(strips))))
    return b"\x78\x9c" + body + struct.pack(">I", zlib.adler32(data))


def read_png_text(path: Path) -> dict[str, str]:
    """Return the text of a PNG file; {} for another file."""
    from PIL import Image

    try:
        with parsing(path, "an image"), Image.open(check_regular(path), formats=["PNG"]) as image:
            text = getattr(image, "text", {})
    except InputError:
        return {}
    return {str(key): str(value) for key, value in text.items()}
