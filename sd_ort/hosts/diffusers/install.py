"""A pipeline folder whose model_index.json names our classes: `DiffusionPipeline.from_pretrained(folder)` opens it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sd_ort.core.errors import InputError
from sd_ort.core.files import write_bytes
from sd_ort.core.folder import components, read_index

LIBRARY = "sd_ort.hosts.diffusers"
# Part of a model_index.json -> its class, and the components that it needs.
CLASSES = {
    "unet": ("OrtUNet", ("unet",)),
    "controlnet": ("OrtControlNet", ("controlnet",)),
    "vae": ("OrtVae", ("vae_encoder", "vae_decoder")),
    "text_encoder": ("OrtTextEncoder", ("text_encoder",)),
    "text_encoder_2": ("OrtTextEncoder", ("text_encoder_2",)),
}
BEFORE = "_sd_ort_before"  # what the index named instead: diffusers ignores names that begin with an underscore


def install(folder: Path | str) -> list[str]:
    """Let the folder's model_index.json name our classes; returns the parts that it now names.

    Raises InputError for a folder that is no pipeline folder of ONNX components.
    """
    folder = Path(folder)
    there = components(folder)
    index = read_index(folder)
    named = {name: cls for name, (cls, needs) in CLASSES.items() if set(needs) <= set(there)}
    if "unet" not in named:
        raise InputError(f"{folder} has no unet/model.onnx: give a folder that `sd-ort optimize` wrote.")
    before: dict[str, Any] = index.get(BEFORE) or {name: index[name] for name in named if name in index}
    for name, cls in named.items():
        index[name] = [LIBRARY, cls]
    _write(folder, {**index, BEFORE: before})
    return list(named)


def uninstall(folder: Path | str) -> None:
    """Let the index name what it named before. Raises InputError for a folder where nothing was installed."""
    folder = Path(folder)
    index = read_index(folder)
    before = index.pop(BEFORE, None)
    if not isinstance(before, dict):
        raise InputError(f"{folder}/model_index.json does not name sd-ort's classes: nothing to uninstall.")
    for name in CLASSES:
        if index.get(name, [None])[0] == LIBRARY:
            del index[name]
    _write(folder, {**index, **before})


def _write(folder: Path, index: dict[str, Any]) -> None:
    write_bytes(folder / "model_index.json", (json.dumps(index, indent=2) + "\n").encode(), overwrite=True)
