"""Downloads from the Hugging Face hub, and its cache."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from sd_ort.core.errors import InputError, first_line
from sd_ort.core.quiet import quiet


def is_hub_id(name: str) -> bool:
    """Return whether `name` looks like a hub id, owner/name, and not like a path in an existing folder."""
    return bool(re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name)) and not Path(name).parent.exists()


def download_pipeline(hub_id: str) -> Path:
    """Return the folder of a pipeline from the hub or its cache. Raises InputError if that fails."""
    from diffusers import DiffusionPipeline

    return _fetch(hub_id, lambda: DiffusionPipeline.download(hub_id, use_safetensors=True))


def download_model(hub_id: str) -> Path:
    """Return the folder of a single model, such as a ControlNet. Raises InputError if that fails."""
    from huggingface_hub import snapshot_download

    return _fetch(hub_id, lambda: snapshot_download(hub_id, allow_patterns=["config.json", "*model.safetensors"]))


def download_configs(hub_id: str) -> Path:
    """Return a folder with the configs, scheduler and tokenizers of a pipeline. Raises InputError if that fails."""
    from huggingface_hub import snapshot_download

    return _fetch(hub_id, lambda: snapshot_download(hub_id, allow_patterns=["*.json", "*/*.json", "*/merges.txt"]))


def cached_pipelines() -> Iterator[tuple[str, Path]]:
    """Yield id and folder of the pipelines in the hub's cache, by name, the newest revision first."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = sorted(scan_cache_dir().repos, key=lambda repository: repository.repo_id)
    except CacheNotFound:
        return
    for repository in repositories:
        for revision in sorted(repository.revisions, key=lambda revision: -revision.last_modified):
            if (revision.snapshot_path / "model_index.json").is_file():
                yield repository.repo_id, revision.snapshot_path


def _fetch(hub_id: str, download: Callable[[], str]) -> Path:
    try:
        with quiet("diffusers", "huggingface_hub"):  # the bars of the download stay
            return Path(download())
    except Exception as error:  # the hub client raises its own errors, httpx's and the system's
        reason = first_line(error).split(" (")[0]
        raise InputError(
            f"{hub_id} is no folder here and cannot be fetched from the hub: check the name and the network, "
            f"or give a diffusers folder ({reason})."
        ) from error
