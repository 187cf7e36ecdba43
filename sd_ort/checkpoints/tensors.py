"""A checkpoint's tensors by name, one at a time, without building a model: what fills templates.

Files are read, not mapped: what was used leaves memory again.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable
from pathlib import Path

import ml_dtypes
import numpy as np

from sd_ort.checkpoints.checkpoint import Source
from sd_ort.checkpoints.tensor_readers import Read
from sd_ort.core.errors import InputError

DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
}  # fmt: skip
# All exponent bits set, in which NaN and infinity are alone.
EXPONENTS: dict[np.dtype, np.unsignedinteger] = {
    np.dtype(np.float32): np.uint32(0x7F800000),
    np.dtype(np.float16): np.uint16(0x7C00),
    np.dtype(ml_dtypes.bfloat16): np.uint16(0x7F80),
}
BLOCK = 1 << 16
# Names of a VAE's attention in folders that old diffusers wrote.
OLD_NAMES = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}


def reader(source: Source, model: str, names: Iterable[str]) -> Read:
    """What reads the tensors `names` of a model, in the type they have there.

    Raises InputError for numbers that are not finite.

    From safetensors files (of a diffusers folder, or a single one) where they hold all of them; else from the loaded
    model.
    """
    read = _from_files(source, model, list(names)) or _from_module(source, model)

    def checked(name: str) -> np.ndarray:
        numbers = read(name)
        if not finite(numbers):
            raise InputError(f"{source.name}: {name} of its {model} holds NaN or infinity: get it again.")
        return numbers

    return checked


def finite(numbers: np.ndarray) -> bool:
    """Whether no number is NaN or infinite: of the common types by their exponents' bits, some at once, which takes an
    eighth of NumPy's time in half precision."""
    if (bits := EXPONENTS.get(numbers.dtype)) is None or not numbers.flags.c_contiguous:
        return bool(np.isfinite(numbers).all())
    flat = numbers.reshape(-1).view(bits.dtype)
    return not any((flat[start : start + BLOCK] & bits).max() == bits for start in range(0, flat.size, BLOCK))


def _from_module(source: Source, model: str) -> Read:
    """The model is loaded when its first tensor is asked for, and goes with the function that this returns."""
    state: dict[str, np.ndarray] = {}
    lock = threading.Lock()

    def read(name: str) -> np.ndarray:
        with lock:
            if not state:
                state.update({key: tensor.numpy() for key, tensor in source.load(model).state_dict().items()})
        return state[name]

    return read


def _from_files(source: Source, model: str, names: list[str]) -> Read | None:
    """From the files that hold the model, where they are safetensors files with all of `names` in types known here."""
    held = source.holder(model)
    if held is None:
        return None
    if any(path.suffix != ".safetensors" for path in held.paths):
        return None
    places = {name: (path, entry) for path in held.paths for name, entry in entries(path).items()}
    found = {name: next((other for other in _spellings(name) if held.has(other, places)), "") for name in names}
    if "" in found.values():
        return None
    if any(places[part][1]["dtype"] not in DTYPES for name in found.values() for part in held.sources(name)):
        return None

    def stored(name: str) -> np.ndarray:
        path, entry = places[name]
        begin, end = entry["data_offsets"]
        dtype = np.dtype(DTYPES[entry["dtype"]])
        return np.fromfile(path, dtype, (end - begin) // dtype.itemsize, offset=begin).reshape(entry["shape"])

    def read(name: str) -> np.ndarray:
        numbers = held.make(found[name], stored)
        squeezed = numbers.ndim == 4 and numbers.shape[2:] == (1, 1) and found[name] != name
        return numbers[:, :, 0, 0] if squeezed else numbers

    return read


def _spellings(name: str) -> Iterable[str]:
    """A tensor's name now, and those it has in folders of other versions of diffusers and transformers."""
    yield name
    yield f"text_model.{name}"
    yield name.removeprefix("text_model.")
    if match := re.search(r"attentions\.0\.(to_q|to_k|to_v|to_out\.0)\.", name):
        yield name.replace(match[1], OLD_NAMES[match[1]])


def entries(path: Path) -> dict[str, dict]:
    """The tensors of a safetensors file with their offsets in the file. Raises InputError for a truncated one."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(min(length, size)))
        except ValueError as error:
            raise InputError(f"{path} is truncated or no safetensors file: get it again.") from error
    header.pop("__metadata__", None)
    for entry in header.values():
        entry["data_offsets"] = [8 + length + offset for offset in entry["data_offsets"]]
        if entry["data_offsets"][1] > size:
            raise InputError(f"{path} is truncated: get it again.")
    return dict(header)
