"""Entries of ComfyUI's model lists: pipeline folders in models/sd_ort, and checkpoints that can be converted."""

from __future__ import annotations

from pathlib import Path

import folder_paths

from sd_ort.core.errors import InputError
from sd_ort.core.pipeline_folder import MANIFEST
from sd_ort.core.progress import ProgressCallback
from sd_ort.integrations.models import default_provider

KIND = "sd_ort"


def root() -> Path:
    """Return models/sd_ort, and register it with ComfyUI."""
    if KIND not in folder_paths.folder_names_and_paths:
        folder_paths.add_model_folder_path(KIND, str(Path(folder_paths.models_dir) / KIND))
    return Path(folder_paths.get_folder_paths(KIND)[0])


def list_pipeline_folders() -> list[str]:
    """Return the names of the pipeline folders in models/sd_ort."""
    return sorted(path.parent.name for path in root().glob(f"*/{MANIFEST}"))


def checkpoints() -> list[str]:
    """Return ComfyUI's checkpoints that can be converted."""
    return [name for name in folder_paths.get_filename_list("checkpoints") if name.endswith(".safetensors")]


def resolve_folder(name: str, provider: str, on_progress: ProgressCallback) -> Path:
    """Return the pipeline folder of a list entry; convert a checkpoint once. Raises the exceptions of `convert`."""
    if name in list_pipeline_folders():
        return root() / name
    half = provider != "cpu"
    return convert(name, f"{Path(name).stem}-{provider}-{'fp16' if half else 'fp32'}", provider, half, on_progress)


def convert(checkpoint: str, name: str, target: str, half: bool, on_progress: ProgressCallback) -> Path:
    """Optimize a checkpoint to models/sd_ort/NAME, unless this folder exists; return the folder.

    Raises:
        InputError: if the name is not that of a folder, or the checkpoint cannot be converted.
    """
    if not name or Path(name).name != name:
        raise InputError(f"{name!r} is no name of a folder: leave out slashes.")
    output = root() / name
    if (output / MANIFEST).is_file():
        on_progress(f"{name} exists already.")
        return output
    path = folder_paths.get_full_path("checkpoints", checkpoint)
    if path is None:
        raise InputError(f"{checkpoint} is neither in models/checkpoints nor in models/sd_ort: refresh the page.")
    from sd_ort.stages import optimize

    target = default_provider() if target == "auto" else target
    dtype = "float16" if half else "float32"
    optimize(path, output, target=target, dtype=dtype, on_progress=on_progress)
    return output
