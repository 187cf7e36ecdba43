"""The small presets, and a checkpoint of one."""

from __future__ import annotations

import pytest
from small_presets import minis

from sd_ort.checkpoints.presets import PRESETS, open_preset


@pytest.fixture(scope="session", autouse=True)
def mini_presets():
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
