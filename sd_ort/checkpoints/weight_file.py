"""Weights in one file of any format that is read tensor by tensor: safetensors and GGUF.

Tensors are listed as the model's author means them. The scale of a float8 or int8 weight belongs to its weight, and the
names of a U-Net alone get the prefix that these have in a whole checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from sd_ort.core import gguf_file, safetensors_file
from sd_ort.core.errors import InputError
from sd_ort.core.safetensors_file import FLOATS, Entry

SAFETENSORS, GGUF = ".safetensors", ".gguf"
SUFFIXES = (SAFETENSORS, GGUF)
INT8 = "INT8"  # dtype of an int8 weight with scales; without any it is I8, which is not read
DTYPES = FLOATS.keys() | gguf_file.BLOCK_DTYPES | {INT8}  # that `read_tensor` reads
SCALES = (".scale_weight", ".weight_scale")  # beside such a weight; ComfyUI's older and newer name
MARK = ".comfy_quant"  # JSON about a layer: `format`, and `convrot` with `convrot_groupsize` if its inputs are rotated
MARK_LIMIT = 1 << 12  # bytes
FORMATS = ("float8_e4m3fn", "float8_e5m2", "int8_tensorwise")
# Beside such weights too: scales of activations, and marks of the file and its layers.
FLOAT8_MARKS = (".scale_input", ".input_scale", MARK, "scaled_fp8")
UNET_PREFIX, BARE_UNET = "model.diffusion_model.", "input_blocks.0.0.weight"


def read_entries(path: Path) -> dict[str, Entry]:
    """Return name -> dtype, shape, `data_offsets` of each tensor.

    It has `scale` too, the entry of its scale, and `rotation`, the columns of each rotated group, if there are such.
    Raises InputError for a damaged file, tensor types that are unknown, scales that are not one or one a row, and
    layers in other formats than FORMATS.
    """
    if path.suffix == GGUF:
        entries: dict[str, Entry] = gguf_file.read_entries(path)[0]
        gguf_file.check_package(path, {entry["dtype"] for entry in entries.values()})
    else:
        entries = safetensors_file.read_entries(path)[0]
    listed = {name: entry for name, entry in entries.items() if not name.endswith((*SCALES, *FLOAT8_MARKS))}
    for name, scale in entries.items():
        if (end := next((end for end in SCALES if name.endswith(end)), None)) is not None:
            weight = listed.get(f"{name.removesuffix(end)}.weight")
            if weight is None:
                listed[name] = scale  # of something else
            else:
                _check_scale(path, name, scale, weight)
                weight["scale"] = scale
                weight["dtype"] = INT8 if weight["dtype"] == "I8" else weight["dtype"]
    for name, mark in entries.items():
        if name.endswith(MARK) and (weight := listed.get(f"{name.removesuffix(MARK)}.weight")) is not None:
            _apply_mark(path, name, mark, weight)
    if BARE_UNET in listed:
        return {f"{UNET_PREFIX}{name}": entry for name, entry in listed.items()}
    return listed


def _check_scale(path: Path, name: str, scale: Entry, weight: Entry) -> None:
    count, rows = int(np.prod(scale["shape"], dtype=np.int64)), weight["shape"][0] if weight["shape"] else 1
    if scale["dtype"] not in FLOATS or count not in (1, rows):
        raise InputError(
            f"{path}: {name} ({scale['dtype']} of the shape {scale['shape']}) scales blocks, which sd-ort does not "
            "read: get the file with one scale a weight, in bfloat16 or in float16."
        )


def _apply_mark(path: Path, name: str, mark: Entry, weight: Entry) -> None:
    """Add `rotation` to the recipe of a weight of a rotated layer. Raises InputError for layers in another format."""
    begin, end = mark["data_offsets"]
    data = np.fromfile(path, np.uint8, min(end - begin, MARK_LIMIT), offset=begin).tobytes()
    try:
        settings = json.loads(data)
        kind, is_rotated, columns = settings["format"], settings.get("convrot"), settings.get("convrot_groupsize")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path}: {name} is no description of a layer: download the file again.") from error
    if kind not in FORMATS:
        raise InputError(
            f"{path} has layers in {str(kind)[:40]}, such as {name.removesuffix(MARK)}: sd-ort reads "
            f"{', '.join(FORMATS)}. Get the file in one of these, in bfloat16, or as GGUF."
        )
    if not is_rotated:
        return
    is_power = isinstance(columns, int) and columns in (4, 16, 64, 256, 1024, 4096)
    if not is_power or weight["dtype"] != INT8 or len(weight["shape"]) != 2 or weight["shape"][1] % columns:
        raise InputError(f"{path}: {name} rotates groups of {str(columns)[:40]} columns, which the weight has not.")
    weight["rotation"] = columns


@cache
def _rotation(size: int) -> np.ndarray:
    """Return the regular Hadamard matrix of a power of 4, divided by its root: symmetric, and its own inverse.

    It is a Kronecker power of the one of size 4, whose sums of rows are equal, unlike those of Sylvester's.
    """
    seed = (np.ones((4, 4), np.float32) - 2 * np.eye(4, dtype=np.float32)[::-1]) / 2
    return seed if size == 4 else np.kron(_rotation(size // 4), seed)


def read_tensor(path: Path, entry: Entry) -> np.ndarray:
    """Return a tensor of `read_entries` in its stored dtype; float32 if it is scaled or in blocks of GGUF.

    Raises InputError for dtypes that are not in DTYPES.
    """
    if entry["dtype"] not in DTYPES:
        raise InputError(f"{path} has tensors of the dtype {entry['dtype']}, which sd-ort does not read.")
    if entry["dtype"] == INT8:
        begin, end = entry["data_offsets"]
        values = np.fromfile(path, np.int8, end - begin, offset=begin).reshape(entry["shape"])
    else:
        values = gguf_file.read_tensor(path, entry)
    if "scale" in entry:
        scale = gguf_file.read_tensor(path, entry["scale"]).astype(np.float32)
        scaled = values.astype(np.float32) * scale.reshape(-1, *[1] * (values.ndim - 1))
        if (columns := entry.get("rotation")) is not None:
            scaled = scaled.reshape(-1, columns) @ _rotation(columns)
        return scaled.reshape(values.shape)
    return values


def dtypes_of(entries: Iterable[Entry]) -> str:
    """Return the dtypes of most bytes, at most two, the largest first, and whether there are scales: for the user."""
    sizes: dict[str, int] = {}
    has_scales = False
    for entry in entries:
        begin, end = entry["data_offsets"]
        sizes[entry["dtype"]] = sizes.get(entry["dtype"], 0) + end - begin
        has_scales = has_scales or "scale" in entry
    names = sorted(sizes, key=lambda dtype: -sizes[dtype])[:2]
    return " and ".join(names) + (" with scales" if has_scales else "")


def architecture(path: Path) -> str:
    """Return what the author of a GGUF file calls its architecture; may be empty."""
    metadata: dict[str, Any] = gguf_file.read_entries(path)[1]
    return str(metadata.get("general.architecture", ""))[:80]
