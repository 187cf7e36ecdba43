"""Weights in one file of any format that is read tensor by tensor: safetensors and GGUF.

Tensors are listed as the model's author means them. The scale of a float8 weight belongs to its weight, and the names
of a U-Net alone get the prefix that these have in a whole checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from sd_ort.core import gguf_file, safetensors_file
from sd_ort.core.errors import InputError
from sd_ort.core.safetensors_file import FLOATS, Entry

SAFETENSORS, GGUF = ".safetensors", ".gguf"
SUFFIXES = (SAFETENSORS, GGUF)
DTYPES = FLOATS.keys() | gguf_file.BLOCK_DTYPES  # that `read_tensor` reads
SCALES = (".scale_weight", ".weight_scale")  # beside a float8 weight; ComfyUI's older and newer name
# Beside float8 weights too: scales of activations, and marks of the file and its layers.
FLOAT8_MARKS = (".scale_input", ".input_scale", ".comfy_quant", "scaled_fp8")
UNET_PREFIX, BARE_UNET = "model.diffusion_model.", "input_blocks.0.0.weight"


def read_entries(path: Path) -> dict[str, Entry]:
    """Return name -> dtype, shape, `data_offsets` and, if it has one, `scale` (the entry of its scale) of each tensor.

    Raises InputError for a damaged file, tensor types that are unknown, and scales that are not one or one a row.
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


def read_tensor(path: Path, entry: Entry) -> np.ndarray:
    """Return a tensor of `read_entries` in its stored dtype; float32 if it is scaled or in blocks of GGUF.

    Raises InputError for dtypes that are not in DTYPES.
    """
    if entry["dtype"] not in DTYPES:
        raise InputError(f"{path} has tensors of the dtype {entry['dtype']}, which sd-ort does not read.")
    values = gguf_file.read_tensor(path, entry)
    if "scale" in entry:
        scale = gguf_file.read_tensor(path, entry["scale"]).astype(np.float32)
        scaled = values.astype(np.float32) * scale.reshape(-1, *[1] * (values.ndim - 1))
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
