"""`accelerate(pipe)`: replaces the models of a loaded diffusers pipeline by the components of a folder, in place."""

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
from sd_ort.integrations.diffusers.components import (
    Component,
    OrtControlNet,
    OrtTextEncoder,
    OrtTransformer,
    OrtUNet,
    OrtVae,
)
from sd_ort.integrations.models import TorchComponentSessions, check_same_model, default_provider

# Attribute of a pipeline -> factory of its replacement.
REPLACEMENTS: dict[str, Callable[[TorchComponentSessions], Component]] = {
    "unet": OrtUNet,
    "transformer": OrtTransformer,
    "controlnet": OrtControlNet,
    "vae": OrtVae,
    "text_encoder": OrtTextEncoder,
    "text_encoder_2": lambda models: OrtTextEncoder(models, "text_encoder_2"),
}
# Transformers whose graph has other inputs than diffusers' forward -> the class of sd-ort that generates with it.
OWN_PIPELINES = {
    "ZImageTransformer2DModel": "ZImagePipeline", "QwenImageTransformer2DModel": "QwenImagePipeline",
    "Krea2Transformer2DModel": "Krea2Pipeline",
}  # fmt: skip
COMPONENTS_OF = {"vae": ("vae_encoder", "vae_decoder")}  # attributes with other components than their name
LORA_METHODS = (
    "load_lora_weights", "set_adapters", "get_list_adapters", "get_active_adapters", "fuse_lora", "unfuse_lora",
    "unload_lora_weights", "disable_lora", "enable_lora", "delete_adapters",
)  # fmt: skip


def accelerate(pipe: Any, folder: Path | str | None = None, *, provider: str | None = None, **options: Any) -> Any:
    """Replace the models of a loaded diffusers pipeline by fused graphs, in place, and return the pipeline.

    LoRAs are loaded with `pipe.load_lora_weights`, `set_adapters` and `unload_lora_weights` as before; PEFT is not
    needed. A pipeline from a folder whose model_index.json names sd-ort's classes is opened again with the given
    options and gets these methods too.

    Args:
        folder: a folder that `sd-ort optimize` wrote for the same model; models without a component stay in torch. A
            folder that does not exist is written from the loaded pipeline. None: a folder in sd-ort's cache, by the
            hash of the weights.
        provider: None for the best one that runs here.
        options: options of `TorchComponentSessions` (low_memory, graph, threads, tuning, ...).

    Raises:
        InputError: if the folder is of another model, or the pipeline has no UNet.
        ProviderError: if the provider cannot be used.
        SdOrtError: if exporting or optimizing fails.
    """
    current = {name: getattr(pipe, name, None) for name in REPLACEMENTS}
    present = [name for name, model in current.items() if isinstance(model, torch.nn.Module)]
    if own := OWN_PIPELINES.get(str(getattr(current["transformer"], "config", {}).get("_class_name"))):
        raise InputError(f"{type(pipe).__name__} is not accelerated in place: generate with sd_ort.{own}.")
    if "transformer" in present:
        present = ["transformer"]  # text encoders and VAE stay in torch
    elif "unet" not in present:
        raise InputError(
            f"{type(pipe).__name__} has no UNet and no transformer: sd-ort accelerates none of its models."
        )
    sessions = next((model.models for model in current.values() if isinstance(model, Component)), None)
    if folder is None and sessions is not None:
        folder, provider = sessions.folder, provider or sessions.provider
    if folder is None or not Path(folder).exists():
        provider = provider or default_provider()
        folder = _cache_path(pipe, present, provider) if folder is None else Path(folder)
        if not folder.exists():
            _write(pipe, present, folder, provider)
    models = TorchComponentSessions(folder, provider, **options)
    _swap_models(pipe, present, models)
    for name in LORA_METHODS:
        setattr(pipe, name, getattr(models, name))
    return pipe


def _swap_models(pipe: Any, present: list[str], models: TorchComponentSessions) -> None:
    """Replace all models that the folder has, or none if one of them has another architecture."""
    replacements = {}
    for name in present:
        parts = COMPONENTS_OF.get(name, (name,))
        if all(part in models for part in parts):
            check_same_model(_config(getattr(pipe, name)), models.folder, parts[-1])
            replacements[name] = REPLACEMENTS[name](models)
    denoiser = "transformer" if "transformer" in present else "unet"
    if denoiser not in replacements:
        raise InputError(f"{models.folder} has no {denoiser}: optimize the pipeline's.")
    for name, component in replacements.items():
        setattr(pipe, name, component)


def _config(model: Any) -> dict[str, Any]:
    config = model.config
    return dict(config) if isinstance(config, dict) else dict(config.to_dict())


def _write(pipe: Any, present: list[str], folder: Path, provider: str) -> None:
    """Export and optimize the loaded pipeline; a template reduces the second time to seconds."""
    from sd_ort.stages import optimize

    if type(getattr(pipe, "controlnet", None)).__name__ == "MultiControlNetModel":
        raise InputError(
            "several ControlNets at once: export one with `sd-ort export --controlnet`, and give its folder."
        )
    half = getattr(pipe, "transformer" if "transformer" in present else "unet").dtype == torch.float16
    with tempfile.TemporaryDirectory(prefix="sd-ort-") as scratch:
        pipe.save_pretrained(scratch)
        names = [part for name in present for part in COMPONENTS_OF.get(name, (name,))]
        dtype = "float16" if half else "float32"
        target = provider if not provider.startswith("plugin:") else None
        optimize(scratch, folder, target=target, dtype=dtype, components=names)


def _cache_path(pipe: Any, present: list[str], provider: str) -> Path:
    """Return the cached folder of a pipeline; the key has its weights and configs, the provider and sd-ort's code."""
    import sd_ort

    digest = hashlib.sha256(
        f"{provider} {getattr(pipe, present[0]).dtype} {code_hash(Path(sd_ort.__file__).parent)}".encode()
    )
    for name in present:
        model = getattr(pipe, name)
        digest.update(json.dumps(_config(model), sort_keys=True, default=str).encode())
        for key, tensor in sorted(model.state_dict().items()):
            digest.update(
                key.encode() + tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            )
    return cache_folder() / "pipelines" / digest.hexdigest()[:20]
