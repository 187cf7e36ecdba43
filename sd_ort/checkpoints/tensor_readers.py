"""Readers of a model's tensors by their diffusers names, one at a time, without building the model.

Files are read, not mapped, so that memory is free again after use.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import ml_dtypes
import numpy as np

from fusion_passes import weight_recipes as recipes
from sd_ort.checkpoints.weight_file import DTYPES, SUFFIXES, read_entries, read_tensor

Read = Callable[[str], np.ndarray]

# Bit masks of the exponent; only NaN and infinity have all of these bits set.
EXPONENT_MASKS: dict[np.dtype, np.unsignedinteger] = {
    np.dtype(np.float32): np.uint32(0x7F800000),
    np.dtype(np.float16): np.uint16(0x7C00),
    np.dtype(ml_dtypes.bfloat16): np.uint16(0x7F80),
}
BLOCK_ELEMENTS = 1 << 16
# Names of a VAE's attention in folders of old versions of diffusers.
OLD_NAMES = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}


class TensorReader(Protocol):
    """Computes tensors of a model, by their diffusers names, from tensors stored in files."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files."""

    def has(self, name: str, stored: Container[str]) -> bool:
        """Return whether there is such a tensor in files that have the tensors `stored`."""

    def stored_names(self, name: str) -> list[str]:
        """Return the names of the stored tensors that the tensor `name` is computed from."""

    def load(self, name: str, read: Read) -> np.ndarray:
        """Return the tensor `name` in its stored dtype. `read(stored_name)` returns one stored tensor."""


@dataclass(frozen=True)
class DirectTensorReader:
    """Reader of files whose tensors already have diffusers names."""

    paths: tuple[Path, ...]

    def has(self, name: str, stored: Container[str]) -> bool:
        return name in stored

    def stored_names(self, name: str) -> list[str]:
        return [name]

    def load(self, name: str, read: Read) -> np.ndarray:
        return read(name)


@dataclass(frozen=True)
class RecipeTensorReader:
    """Reader of a model in a file with other names. `recipes`: diffusers name -> recipe of stored tensors."""

    paths: tuple[Path, ...]
    recipes: Mapping[str, recipes.WeightRecipe]

    def has(self, name: str, stored: Container[str]) -> bool:
        return name in self.recipes

    def stored_names(self, name: str) -> list[str]:
        return recipes.sources(self.recipes[name])

    def load(self, name: str, read: Read) -> np.ndarray:
        return recipes.evaluate(self.recipes[name], read)


@dataclass(frozen=True)
class IPAdapterTensorReader:
    """Reader of a UNet with an IP-Adapter. `names`: name in the UNet -> name in `file`, of the adapter's tensors."""

    unet: TensorReader
    file: Path
    names: Mapping[str, str]

    @property
    def paths(self) -> tuple[Path, ...]:
        return (*self.unet.paths, self.file)

    def has(self, name: str, stored: Container[str]) -> bool:
        return self.names[name] in stored if name in self.names else self.unet.has(name, stored)

    def stored_names(self, name: str) -> list[str]:
        return [self.names[name]] if name in self.names else self.unet.stored_names(name)

    def load(self, name: str, read: Read) -> np.ndarray:
        return read(self.names[name]) if name in self.names else self.unet.load(name, read)


def open_tensors(reader: TensorReader, names: Iterable[str]) -> Read | None:
    """Return a function that reads the tensors `names` in their stored dtype, dequantized ones in float32.

    Returns None unless the files are safetensors or GGUF files that have all of them in dtypes of `DTYPES`.
    """
    if any(path.suffix not in SUFFIXES for path in reader.paths):
        return None
    entries = {name: (path, entry) for path in reader.paths for name, entry in read_entries(path).items()}
    spellings = {name: next((other for other in _spellings(name) if reader.has(other, entries)), "") for name in names}
    if "" in spellings.values():
        return None
    stored_names = [stored for name in spellings.values() for stored in reader.stored_names(name)]
    if any(entries[name][1]["dtype"] not in DTYPES for name in stored_names):
        return None
    # Query, key and value may be one stored matrix: it is not dequantized anew for each while they follow each other.
    joined = {
        name
        for name, count in Counter(stored_names).items()
        if count > 1 and entries[name][1].keys() & {"rows", "rotation"}
    }
    latest: dict[str, np.ndarray] = {}

    def read_stored(name: str) -> np.ndarray:
        if (values := latest.get(name)) is not None:
            return values
        values = read_tensor(*entries[name])
        if name in joined:
            latest.clear()
            latest[name] = values
        return values

    def read(name: str) -> np.ndarray:
        values = reader.load(spellings[name], read_stored)
        is_old_conv = values.ndim == 4 and values.shape[2:] == (1, 1) and spellings[name] != name
        return values[:, :, 0, 0] if is_old_conv else values

    return read


def _spellings(name: str) -> Iterable[str]:
    """Yield a tensor's name, then its names in folders of other versions of diffusers and transformers."""
    yield name
    yield f"text_model.{name}"
    yield name.removeprefix("text_model.")
    yield f"model.{name}"  # of a language model with its head, read without it
    yield name.removeprefix("model.")
    yield name.replace("model.language_model.", "model.", 1)  # of Qwen2.5-VL before transformers 5
    yield name.replace("model.language_model.", "language_model.model.", 1)  # of Mistral 3
    if name == "shared.weight":  # of T5, whose encoder has the same embedding
        yield "encoder.embed_tokens.weight"
    if match := re.search(r"attentions\.0\.(to_q|to_k|to_v|to_out\.0)\.", name):
        yield name.replace(match[1], OLD_NAMES[match[1]])


def is_finite(values: np.ndarray) -> bool:
    """Return whether no value is NaN or infinite.

    Common dtypes are tested by their exponent bits, which takes an eighth of NumPy's time in half precision.
    """
    if (mask := EXPONENT_MASKS.get(values.dtype)) is None or not values.flags.c_contiguous:
        return bool(np.isfinite(values).all())
    bits = values.reshape(-1).view(mask.dtype)
    blocks = (bits[start : start + BLOCK_ELEMENTS] for start in range(0, bits.size, BLOCK_ELEMENTS))
    return not any((block & mask).max() == mask for block in blocks)
