"""What ComfyUI's lists show: sd-ort's pipeline folders in models/sd_ort, and checkpoints that become such folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import folder_paths

from sd_ort.core.errors import InputError
from sd_ort.core.folder import MANIFEST
from sd_ort.hosts.models import default_provider

KIND = "sd_ort"
Report = Callable[[str], None]


def root() -> Path:
    """models/sd_ort, which ComfyUI is told about."""
    if KIND not in folder_paths.folder_names_and_paths:
        folder_paths.add_model_folder_path(KIND, str(Path(folder_paths.models_dir) / KIND))
    return Path(folder_paths.get_folder_paths(KIND)[0])


def converted() -> list[str]:
    """Names of the pipeline folders in models/sd_ort."""
    return sorted(path.parent.name for path in root().glob(f"*/{MANIFEST}"))


def checkpoints() -> list[str]:
    """ComfyUI's checkpoints that can be converted."""
    return [name for name in folder_paths.get_filename_list("checkpoints") if name.endswith(".safetensors")]


def folder_of(name: str, provider: str, report: Report) -> Path:
    """The pipeline folder of an entry of the lists; a checkpoint is converted once. Raises what converting raises."""
    if name in converted():
        return root() / name
    half = provider != "cpu"
    return convert(name, f"{Path(name).stem}-{provider}-{'fp16' if half else 'fp32'}", provider, half, report)


def convert(checkpoint: str, name: str, target: str, half: bool, report: Report) -> Path:
    """Optimize a checkpoint into models/sd_ort/NAME, unless it is there already.

    Raises InputError for a name that is no folder's, or a checkpoint that cannot be converted.
    """
    if not name or Path(name).name != name:
        raise InputError(f"{name!r} is no name of a folder: leave out slashes.")
    output = root() / name
    if (output / MANIFEST).is_file():
        report(f"{name} is there already.")
        return output
    path = folder_paths.get_full_path("checkpoints", checkpoint)
    if path is None:
        raise InputError(f"{checkpoint} is neither in models/checkpoints nor in models/sd_ort: refresh the page.")
    from sd_ort.from_checkpoint import optimize_checkpoint

    target = default_provider() if target == "auto" else target
    dtype = "float16" if half else "float32"
    optimize_checkpoint(path, output, target=target, dtype=dtype, hoisted=None, report=report)
    return output
