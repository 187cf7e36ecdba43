"""Writes sd-ort's classes into a folder's model_index.json, so that `DiffusionPipeline.from_pretrained` opens it.

Imports neither torch nor diffusers, as `install-host` does not need them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sd_ort.core.errors import InputError
from sd_ort.core.pipeline_folder import components, read_index, rewrite_index

LIBRARY = "sd_ort.integrations.diffusers"
# Entry of model_index.json -> its class, and the required components.
CLASSES = {
    "unet": ("OrtUNet", ("unet",)),
    "transformer": ("OrtTransformer", ("transformer",)),
    "controlnet": ("OrtControlNet", ("controlnet",)),
    "vae": ("OrtVae", ("vae_encoder", "vae_decoder")),
    "text_encoder": ("OrtTextEncoder", ("text_encoder",)),
    "text_encoder_2": ("OrtTextEncoder", ("text_encoder_2",)),
}
ORIGINAL_ENTRIES_KEY = "_sd_ort_before"  # the original entries; diffusers ignores names with a leading underscore


def install(folder: Path | str) -> list[str]:
    """Replace the entries of the folder's model_index.json by sd-ort's classes; return the names of these entries.

    Raises:
        InputError: if the folder has no ONNX UNet.
    """
    folder = Path(folder)
    present = set(components(folder))
    index = read_index(folder)
    classes = {name: cls for name, (cls, required) in CLASSES.items() if set(required) <= present}
    if "transformer" in classes:
        classes = {"transformer": classes["transformer"]}  # text encoders and VAE stay in torch
    elif "unet" not in classes:
        raise InputError(f"{folder} has no unet/model.onnx: give a folder that `sd-ort optimize` wrote.")
    original: dict[str, Any] = index.get(ORIGINAL_ENTRIES_KEY) or {n: index[n] for n in classes if n in index}
    for name, cls in classes.items():
        index[name] = [LIBRARY, cls]
    _write(folder, {**index, ORIGINAL_ENTRIES_KEY: original})
    return list(classes)


def uninstall(folder: Path | str) -> None:
    """Restore the original entries of model_index.json. Raises InputError if nothing was installed."""
    folder = Path(folder)
    index = read_index(folder)
    original = index.pop(ORIGINAL_ENTRIES_KEY, None)
    if not isinstance(original, dict):
        raise InputError(f"{folder}/model_index.json does not name sd-ort's classes: nothing to uninstall.")
    for name in CLASSES:
        if index.get(name, [None])[0] == LIBRARY:
            del index[name]
    _write(folder, {**index, **original})


def _write(folder: Path, index: dict[str, Any]) -> None:
    rewrite_index(folder, (json.dumps(index, indent=2) + "\n").encode())
