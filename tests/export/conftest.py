"""The small presets, a checkpoint of one, and exports of a test module's family of diffusion transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_presets import minis

import sd_ort
from scripts.fixtures.parity_models import Models
from sd_ort.checkpoints.presets import PRESETS, open_preset
from sd_ort.export import exporter
from sd_ort.stages import optimize


@pytest.fixture(scope="session", autouse=True)
def mini_presets(shared_exports: None):
    """Add `sd15-mini` and the like to the presets."""
    presets = minis()
    PRESETS.update(presets)
    yield
    for name in presets:
        del PRESETS[name]


@pytest.fixture(scope="session")
def checkpoint(mini_presets, tmp_path_factory):
    """Return a diffusers folder in float16 with random weights."""
    from diffusers import DiffusionPipeline

    root = tmp_path_factory.mktemp("checkpoint")
    source = open_preset("sd15-mini", 5)
    (root / "configs").mkdir()
    source.write_configs(root / "configs")
    components = {name: source.load(name).half() for name in source.configs}
    components |= {"safety_checker": None, "feature_extractor": None}
    DiffusionPipeline.from_pretrained(root / "configs", **components).save_pretrained(root / "sd")
    return root / "sd"


@pytest.fixture(scope="module")
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Return an export of the module's FAMILY, its transformer of opset 20, and diffusers' pipeline."""
    exported = Models(tmp_path_factory.mktemp(request.module.FAMILY))
    exported.export(request.module.FAMILY)
    return exported


@pytest.fixture(scope="module")
def of_opset_23(request: pytest.FixtureRequest, models: Models) -> Path:
    """Return an export of the transformer of opset 23."""
    out, name = models.folder / "23", f"parity-{request.module.FAMILY}"
    exporter.export(None, out, preset=name, random_weights=True, opset=23, components=["transformer"])
    return out


@pytest.fixture(scope="module")
def hoisted(request: pytest.FixtureRequest, models: Models) -> Any:
    """Return the pipeline of the module's KIND over its family's export, optimized for `cpu` and hoisted."""
    out = models.folder / "hoisted"
    optimize(models.export(request.module.FAMILY), out, target="cpu", hoist=True)
    return getattr(sd_ort, request.module.KIND).from_pretrained(out, "cpu")
