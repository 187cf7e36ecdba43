"""`accelerate(pipe)`: the models of a loaded diffusers pipeline, swapped for the components of a folder, in place."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sd_ort.core.cache import cache_folder
from sd_ort.core.errors import InputError
from sd_ort.core.files import code_hash
from sd_ort.hosts.diffusers.components import Component, OrtControlNet, OrtTextEncoder, OrtUNet, OrtVae
from sd_ort.hosts.models import HostModels, check_same_model, default_provider

# Attribute of a pipeline -> what takes its place, with the arguments behind `models`.
SWAPS: dict[str, Callable[[HostModels], Component]] = {
    "unet": OrtUNet,
    "controlnet": OrtControlNet,
    "vae": OrtVae,
    "text_encoder": OrtTextEncoder,
    "text_encoder_2": lambda models: OrtTextEncoder(models, "text_encoder_2"),
}
PARTS = {"vae": ("vae_encoder", "vae_decoder")}
LORA_METHODS = (
    "load_lora_weights", "set_adapters", "get_list_adapters", "get_active_adapters", "fuse_lora", "unfuse_lora",
    "unload_lora_weights", "disable_lora", "enable_lora", "delete_adapters",
)  # fmt: skip


def accelerate(pipe: Any, folder: Path | str | None = None, *, provider: str | None = None, **options: Any) -> Any:
    """Run a loaded diffusers pipeline on fused graphs: its models are swapped for a folder's, in place; returns it.

    `folder`: a pipeline folder that `sd-ort optimize` wrote of the same model; what it lacks stays torch's. A folder
    that is not there yet is written, from the pipeline as it is loaded; None keeps it in sd-ort's cache, by the
    weights' hash. `provider`: None for the installed wheel's. `options`: those of `runtime.components.Components`
    (low_memory, graph, threads, tuning, ...).

    LoRAs then go through `pipe.load_lora_weights`, `set_adapters` and `unload_lora_weights` as before; PEFT is not
    needed. A pipeline that was opened from a folder whose model_index.json names our classes is opened again with
    these options, and gets the methods too.

    Raises InputError for a folder of another model or a pipeline without one that can be swapped, ProviderError for a
    provider that cannot be used, and what exporting and optimizing raise.
    """
    opened = {name: getattr(pipe, name, None) for name in SWAPS}
    present = [name for name, model in opened.items() if isinstance(model, torch.nn.Module)]
    if "unet" not in present:
        raise InputError(f"{type(pipe).__name__} has no UNet: sd-ort runs SD 1.x, 2.x and SDXL pipelines.")
    ours = next((model.models for model in opened.values() if isinstance(model, Component)), None)
    if folder is None and ours is not None:
        folder, provider = ours.folder, provider or ours.provider
    provider = provider or default_provider()
    folder = _cached(pipe, present, provider) if folder is None else Path(folder)
    if not folder.exists():
        _write(pipe, present, folder, provider)
    models = HostModels(folder, provider, **options)
    _swap(pipe, present, models)
    for name in LORA_METHODS:
        setattr(pipe, name, getattr(models, name))
    return pipe


def _swap(pipe: Any, present: list[str], models: HostModels) -> None:
    """All that fit, or none."""
    made = {}
    for name in present:
        parts = PARTS.get(name, (name,))
        if all(part in models for part in parts):
            check_same_model(_config(getattr(pipe, name)), models.folder, parts[-1])
            made[name] = SWAPS[name](models)
    if "unet" not in made:
        raise InputError(f"{models.folder} has no unet: optimize the pipeline's.")
    for name, component in made.items():
        setattr(pipe, name, component)


def _config(model: Any) -> dict[str, Any]:
    config = model.config
    return dict(config) if isinstance(config, dict) else dict(config.to_dict())


def _write(pipe: Any, present: list[str], folder: Path, provider: str) -> None:
    """Export and optimize the pipeline as it is loaded; a template makes it seconds the second time."""
    from sd_ort.from_checkpoint import optimize_checkpoint

    if type(getattr(pipe, "controlnet", None)).__name__ == "MultiControlNetModel":
        raise InputError(
            "several ControlNets at once: export one with `sd-ort export --controlnet`, and give its folder."
        )
    half = pipe.unet.dtype == torch.float16
    with tempfile.TemporaryDirectory(prefix="sd-ort-") as scratch:
        pipe.save_pretrained(scratch)
        names = [part for name in present for part in PARTS.get(name, (name,))]
        dtype = "float16" if half else "float32"
        target = provider if not provider.startswith("plugin:") else None
        optimize_checkpoint(scratch, folder, target=target, dtype=dtype, components=names, hoisted=None)


def _cached(pipe: Any, present: list[str], provider: str) -> Path:
    """Where the pipeline's folder is kept: by its weights and configs, the provider and our code."""
    import sd_ort

    digest = hashlib.sha256(f"{provider} {pipe.unet.dtype} {code_hash(Path(sd_ort.__file__).parent)}".encode())
    for name in present:
        model = getattr(pipe, name)
        digest.update(json.dumps(_config(model), sort_keys=True, default=str).encode())
        for key, tensor in sorted(model.state_dict().items()):
            digest.update(
                key.encode() + tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            )
    return cache_folder() / "pipelines" / digest.hexdigest()[:20]
