"""A pipeline folder as far as the benchmark looks before it opens a model."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_folders import fake_folder


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    return fake_folder(tmp_path / "raw", stage="export", source={"model": "demo", "random_weights": False}, options={})
