"""The reader of safetensors files, without torch: the header is checked before any tensor is read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from sd_ort.core.errors import InputError
from sd_ort.core.files import open_regular, parsing
from sd_ort.core.schema import bounded, list_of, record_type, schema_mismatch

FLOATS = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
}  # fmt: skip
INTEGERS = {
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U64": np.uint64, "U32": np.uint32,
    "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
DTYPES = {**FLOATS, **INTEGERS}
HEADER_LIMIT = 100_000_000  # bytes, as in the safetensors library
KIND = "a safetensors file"
OTHER_FILES = {  # by their first bytes: what downloads leave in the place of a file
    b"version ": "a Git LFS pointer: run `git lfs pull`", b"<!doctyp": "a web page", b"<html": "a web page",
    b"pk\3\4": "a zip file",
}  # fmt: skip
Entry = dict[str, Any]


SIZE_LIMIT = (1 << 48) - 1  # of a shape's axis, of a tensor's elements, and of a file
_SIZE = bounded(int, 0, SIZE_LIMIT)
_ENTRY = record_type("Entry", {}, {"dtype": str, "shape": list_of(_SIZE), "data_offsets": list_of(_SIZE, 2, 2)})


def read_entries(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return the tensors of a file, and its metadata: name -> dtype, shape, `data_offsets` from the start of the file.

    Raises InputError for a file that is truncated or of another format.
    """
    with parsing(path, KIND), open_regular(path) as file:
        return _read_entries(file)


def _read_entries(file: BinaryIO) -> tuple[dict[str, Entry], dict[str, str]]:
    size = file.seek(0, 2)
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(HEADER_LIMIT, size - 8):
        file.seek(0)
        start = file.read(8).lower()
        raise ValueError(next((kind for prefix, kind in OTHER_FILES.items() if start.startswith(prefix)), "truncated"))
    header = json.loads(file.read(length))
    metadata = header.pop("__metadata__", {})
    if schema_mismatch(metadata, dict[str, str | None]):
        raise ValueError("damaged metadata")
    for name, entry in header.items():
        if schema_mismatch(entry, _ENTRY):
            raise ValueError(f"damaged entry {name!r}")
        # torch computes strides that overflow even where a length of 0 leaves no data.
        if math.prod(length or 1 for length in entry["shape"]) > SIZE_LIMIT:
            raise ValueError(f"damaged shape of {name!r}")
        begin, end = entry["data_offsets"] = [8 + length + offset for offset in entry["data_offsets"]]
        if not begin <= end <= size:
            raise ValueError("truncated")
        count = math.prod(entry["shape"])
        if (dtype := DTYPES.get(entry["dtype"])) is None:
            if count > 2 * (end - begin):  # the smallest dtypes have 4 bits
                raise ValueError(f"{name!r} is smaller than its shape asks for")
        else:
            expected = count * np.dtype(dtype).itemsize
            if end - begin != expected:
                raise ValueError(f"{name!r} has {end - begin} bytes where its shape asks for {expected}")
    return header, metadata


def read_float32(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return the tensors of a file, converted to float32, and its metadata. Raises InputError as `read_entries`."""
    with parsing(path, KIND), open_regular(path) as file:
        entries, metadata = _read_entries(file)
        return {name: _read(file, entry).astype(np.float32) for name, entry in entries.items()}, metadata


def _read(file: BinaryIO, entry: Entry) -> np.ndarray:
    if entry["dtype"] not in DTYPES:
        raise InputError(f"{file.name} has tensors of the dtype {entry['dtype']}, which sd-ort does not read.")
    begin, end = entry["data_offsets"]
    file.seek(begin)
    return np.frombuffer(file.read(end - begin), DTYPES[entry["dtype"]]).reshape(entry["shape"])
