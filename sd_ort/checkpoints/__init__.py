"""Checkpoints of Stable Diffusion pipelines: opening them, and their configs, schedules and inputs."""

from __future__ import annotations

from pathlib import Path

from sd_ort.checkpoints.hub import is_hub_id
from sd_ort.core.pipeline_folder import MODEL
from sd_ort.demo import FOLDERS


def is_diffusers_folder(folder: Path) -> bool:
    """Return whether a folder is a pipeline with torch weights, not ONNX models."""
    return (folder / "model_index.json").is_file() and not any(folder.glob(f"*/{MODEL}"))


def is_checkpoint(source: str | Path) -> bool:
    """Return whether `source` is what `sd-ort export` takes, and no pipeline folder and no ONNX file."""
    path = Path(source)
    if path.is_dir():
        return is_diffusers_folder(path)
    return (path.is_file() and path.suffix != ".onnx") or str(source) in FOLDERS or is_hub_id(str(source))
