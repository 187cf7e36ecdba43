"""diffusers' pipeline of a model in torch, and its torch device for a provider."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sd_ort.checkpoints.checkpoint import Checkpoint
from sd_ort.checkpoints.diffusion_transformers import FAMILIES
from sd_ort.checkpoints.open import open_checkpoint
from sd_ort.checkpoints.presets import open_preset
from sd_ort.core.errors import InputError, SdOrtError

if TYPE_CHECKING:
    import torch


def torch_device(provider: str) -> tuple[str, torch.dtype]:
    """Return torch's device and dtype for a provider: float32 on a CPU, float16 on a GPU.

    Raises SdOrtError if torch has no GPU.
    """
    import torch

    if provider == "cpu":
        return "cpu", torch.float32
    if not torch.cuda.is_available():
        raise SdOrtError("this torch sees no GPU: install the torch build for it to compare with.")
    return "cuda", torch.float16


def open_model(model: str, random_weights: bool, seed: int) -> Checkpoint:
    """Return a checkpoint; with `random_weights` a preset, whose weights have the seed `seed`."""
    return open_preset(model, seed) if random_weights else open_checkpoint(model)


def torch_pipeline(model: str, random_weights: bool = False, seed: int = 0, **others: Any) -> Any:
    """Return diffusers' pipeline of a model, in float32 on the CPU, without safety checker.

    `model`: "demo", a diffusers folder or a hub id; with `random_weights` a preset, whose weights have the seed `seed`.
    `others`: parts in place of the folder's.

    Raises:
        InputError: if the model cannot be loaded.
    """
    from diffusers import DiffusionPipeline

    source = open_model(model, random_weights, seed)
    components: dict[str, Any] = {name: source.load(name) for name in source.configs}
    absent = ("safety_checker", "feature_extractor", "image_encoder")
    components |= {name: None for name in absent if name in source.index}
    if family := FAMILIES.get(str((source.index.get("transformer") or [None, None])[1])):
        for name in family.optional_encoders:  # which diffusers wants named
            if name not in source.configs:
                components |= {name: None, name.replace("text_encoder", "tokenizer"): None}
    try:
        with tempfile.TemporaryDirectory() as folder:
            source.write_configs(Path(folder))
            pipeline = DiffusionPipeline.from_pretrained(folder, **components, **others)
    except (OSError, ValueError) as error:
        raise InputError(f"diffusers cannot open {model}: {error}") from error
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
