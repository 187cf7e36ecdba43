"""The mini presets, and a checkpoint of one."""

from __future__ import annotations

import pytest
from minis import minis

from sd_ort.family.checkpoints import PresetSource
from sd_ort.family.presets import PRESETS


@pytest.fixture(scope="session", autouse=True)
def mini_presets():
    """`sd15-mini` and the like, beside the real presets."""
    made = minis()
    PRESETS.update(made)
    yield
    for name in made:
        del PRESETS[name]


@pytest.fixture(scope="session")
def checkpoint(mini_presets, tmp_path_factory):
    """A folder saved by diffusers, in fp16, with random weights."""
    from diffusers import DiffusionPipeline

    root = tmp_path_factory.mktemp("checkpoint")
    source = PresetSource("sd15-mini", 5)
    (root / "configs").mkdir()
    source.write_configs(root / "configs")
    parts = {name: source.load(name).half() for name in source.configs}
    parts |= {"safety_checker": None, "feature_extractor": None}
    DiffusionPipeline.from_pretrained(root / "configs", **parts).save_pretrained(root / "sd")
    return root / "sd"
