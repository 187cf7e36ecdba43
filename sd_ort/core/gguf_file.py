"""The reader of GGUF files: the header is checked before any tensor is read; the package `gguf` dequantizes.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. ComfyUI-GGUF reshapes filters to rows of 256 elements
before it quantizes these, and stores their shape as metadata (ORIGINAL_SHAPE).
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sd_ort.core.errors import InputError
from sd_ort.core.files import open_regular, parsing
from sd_ort.core.safetensors_file import FLOATS, SIZE_LIMIT, Entry

KIND = "a GGUF file"
# Type number -> dtype, elements and bytes of a block. The dtypes of one element are those of safetensors files.
TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 28: ("F64", 1, 8),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 20: ("IQ4_NL", 32, 18), 23: ("IQ4_XS", 256, 136),
}  # fmt: skip
BLOCK_DTYPES = frozenset(name for name, elements, _ in TYPES.values() if elements > 1)
ORIGINAL_SHAPE = "comfy.gguf.orig_shape."  # and the tensor's name: its shape before it was quantized
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
# Far above those of image models (2,000 tensors and some metadata); a damaged count must not cost time or memory.
COUNT_LIMIT, ELEMENT_LIMIT, STRING_LIMIT = 1 << 16, 1 << 20, 1 << 20
AXES_LIMIT = 8


@dataclass
class _Header:
    """Reads the header from the start of an open file of `size` bytes, never beyond its end."""

    file: BinaryIO
    size: int
    elements: int = 0  # of arrays, so far
    metadata: dict[str, Any] = field(default_factory=dict)

    def take(self, count: int) -> bytes:
        data = self.file.read(count) if count <= self.size else b""
        if len(data) != count:
            raise ValueError("truncated")
        return data

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def string(self) -> str:
        length = self.number("Q")
        if length > STRING_LIMIT:
            raise ValueError(f"a string of {length} bytes")
        return self.take(length).decode()

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind != ARRAY:
            raise ValueError(f"metadata of the unknown type {kind}")
        kind, count = self.number("I"), self.number("Q")
        self.elements += count
        if kind == ARRAY or self.elements > ELEMENT_LIMIT:
            raise ValueError(f"an array of {count} elements" if kind != ARRAY else "an array of arrays")
        return [self.value(kind) for _ in range(count)]


def read_entries(path: Path) -> tuple[dict[str, Entry], dict[str, Any]]:
    """Return the tensors of a file, and its metadata: name -> dtype, shape, `data_offsets` from the start of the file.

    Shapes are PyTorch's, the last axis contiguous. `rows`: shape as it is quantized, if that is another one.
    Raises InputError for a file that is truncated, of another format or version, and for unknown tensor types.
    """
    with parsing(path, KIND), open_regular(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        return _read_entries(path, _Header(file, size))


def _read_entries(path: Path, header: _Header) -> tuple[dict[str, Entry], dict[str, Any]]:
    if header.take(4) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version = header.number("I")
    if version not in (2, 3):
        raise InputError(f"{path} is a GGUF file of version {version}: sd-ort reads 2 and 3, little-endian.")
    tensor_count, value_count = header.number("Q"), header.number("Q")
    if max(tensor_count, value_count) > COUNT_LIMIT:
        raise ValueError(f"a count of {max(tensor_count, value_count)}")
    for _ in range(value_count):
        key = header.string()
        header.metadata[key] = header.value(header.number("I"))
    infos = [_read_info(header) for _ in range(tensor_count)]
    alignment = header.metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
        raise ValueError("damaged alignment")
    start = -(-header.file.tell() // alignment) * alignment
    entries: dict[str, Entry] = {}
    for name, dimensions, number, offset in infos:
        if number not in TYPES:
            supported = ", ".join(dtype for dtype, *_ in TYPES.values())
            raise InputError(
                f"{path}: {name[:80]} is of the type {number}, which sd-ort does not read (only {supported})."
            )
        if name in entries:
            raise ValueError(f"{name[:80]!r} twice")
        entries[name] = _entry(name, dimensions, TYPES[number], start + offset, header)
    return entries, header.metadata


def _read_info(header: _Header) -> tuple[str, list[int], int, int]:
    """Return name, dimensions (innermost first), type number and offset of a tensor."""
    name, axes = header.string(), header.number("I")
    if axes > AXES_LIMIT:
        raise ValueError(f"{name[:80]!r} with {axes} axes")
    dimensions = [header.number("Q") for _ in range(axes)]
    return name, dimensions, header.number("I"), header.number("Q")


def _entry(name: str, dimensions: list[int], kind: tuple[str, int, int], begin: int, header: _Header) -> Entry:
    dtype, elements, size = kind
    count = math.prod(dimensions)
    if math.prod(length or 1 for length in dimensions) > SIZE_LIMIT:
        raise ValueError(f"damaged shape of {name[:80]!r}")
    if elements > 1 and (not dimensions or dimensions[0] % elements):
        raise ValueError(f"{name[:80]!r} has rows that are no multiple of {elements} elements")
    end = begin + count // elements * size
    if end > header.size:
        raise ValueError("truncated")
    rows = dimensions[::-1]
    original = header.metadata.get(f"{ORIGINAL_SHAPE}{name}", rows)
    if not isinstance(original, list) or not all(isinstance(n, int) and n >= 0 for n in original):
        raise ValueError(f"damaged shape of {name[:80]!r}")
    if math.prod(original) != count:
        raise ValueError(f"{name[:80]!r} has {count} elements and an original shape of {math.prod(original)}")
    return {"dtype": dtype, "shape": original, "data_offsets": [begin, end]} | ({"rows": rows} if elements > 1 else {})


def check_package(path: Path, dtypes: set[str]) -> None:
    """Raise InputError if tensors of these dtypes need the package `gguf` and it is not installed."""
    if not dtypes & BLOCK_DTYPES:
        return
    try:
        import gguf.quants  # noqa: F401
    except ModuleNotFoundError as error:
        raise InputError(
            f"{path} has quantized weights, which need {error.name}: pip install 'sd-ort[gguf]'."
        ) from error


def read_tensor(path: Path, entry: Entry) -> np.ndarray:
    """Return a tensor in its stored dtype, dequantized to float32 if that is one of BLOCK_DTYPES."""
    begin, end = entry["data_offsets"]
    if entry["dtype"] not in BLOCK_DTYPES:
        dtype = np.dtype(FLOATS[entry["dtype"]])
        return np.fromfile(path, dtype, (end - begin) // dtype.itemsize, offset=begin).reshape(entry["shape"])
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    *outer, _ = entry["rows"]
    data = np.fromfile(path, np.uint8, end - begin, offset=begin)
    if data.size == 0:
        return np.zeros(entry["shape"], np.float32)
    with np.errstate(all="ignore"):  # NaN and infinity are reported by what reads the checkpoint
        values = dequantize(data.reshape(math.prod(outer), -1), GGMLQuantizationType[entry["dtype"]])
    return values.astype(np.float32, copy=False).reshape(entry["shape"])
