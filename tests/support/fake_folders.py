"""Pipeline folders without models, for tests of commands that only list folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sd_ort.core.pipeline_folder import MODEL, write_manifest


def fake_folder(path: Path, **manifest: Any) -> Path:
    """Write a pipeline folder without a model."""
    (path / "unet").mkdir(parents=True)
    (path / "unet" / MODEL).touch()
    (path / "model_index.json").write_text("{}")
    if manifest:
        write_manifest(path, manifest)
    return path
