"""Models fetched from the Hugging Face hub, or found in its cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sd_ort.core.errors import InputError, first_line
from sd_ort.core.quiet import quiet


def download_pipeline(hub_id: str) -> Path:
    """Fetch a pipeline from the Hugging Face hub, or find it in its cache. Raises InputError when that fails."""
    from diffusers import DiffusionPipeline

    return _fetch(hub_id, lambda: DiffusionPipeline.download(hub_id, use_safetensors=True))


def download_model(hub_id: str) -> Path:
    """Fetch a single model, such as a ControlNet, from the hub. Raises InputError when that fails."""
    from huggingface_hub import snapshot_download

    return _fetch(hub_id, lambda: snapshot_download(hub_id, allow_patterns=["config.json", "*model.safetensors"]))


def download_configs(hub_id: str) -> Path:
    """Fetch the configs, scheduler and tokenizers of a pipeline, no weights. Raises InputError when that fails."""
    from huggingface_hub import snapshot_download

    return _fetch(hub_id, lambda: snapshot_download(hub_id, allow_patterns=["*.json", "*/*.json", "*/merges.txt"]))


def _fetch(hub_id: str, download: Callable[[], str]) -> Path:
    try:
        with quiet("diffusers", "huggingface_hub"):  # the bars of the download stay
            return Path(download())
    except Exception as error:  # the hub client raises its own, httpx's and the system's kinds
        reason = first_line(error).split(" (")[0]
        raise InputError(
            f"{hub_id} is no folder here and cannot be fetched from the hub: check the name and the network, "
            f"or give a diffusers folder ({reason})."
        ) from error
