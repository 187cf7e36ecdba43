"""The demo LoRAs: styled prompts, and that the files fit the demo model."""

from __future__ import annotations

import random

import numpy as np
import pytest
from safetensors import safe_open

from sd_ort.core.errors import InputError
from sd_ort.demo import MODEL_DIR, scenes, styles
from sd_ort.demo.fidelity import matches
from sd_ort.weights.lora_files import read_adapter

PROMPT = "a small black star left of a red ring on a cyan background"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["night"], "a small white star left of a red ring on a black background"),
        (["gold"], "a small yellow star left of a yellow ring on a cyan background"),
        (["night", "gold"], "a small yellow star left of a yellow ring on a black background"),
        ([], PROMPT),
    ],
)
def test_a_styled_image_matches_the_styled_prompt(names: list[str], expected: str) -> None:
    assert styles.styled_prompt(names, PROMPT) == expected
    scene = styles.apply_styles(names, scenes.parse(PROMPT))
    image = scenes.render(scene, scenes.random_geometry(scene, random.Random(0)))
    assert matches(styles.styled_prompt(names, PROMPT), image)
    assert matches(PROMPT, image) == (not names)
    with pytest.raises(InputError):
        styles.styled_prompt(names, "a dog")


def test_every_style_changes_styleable_scenes() -> None:
    unseen = [scenes.parse(prompt) for prompt in scenes.unseen_prompts(120, seed=1)]
    styleable = [scene for scene in unseen if styles.is_styleable(scene)]
    assert len(styleable) >= 50
    for scene in styleable:
        for name in styles.STYLES:
            styled = styles.apply_styles([name], scene)
            assert styled != scene
            assert styled.background not in {item.color for item in styled.items}


@pytest.mark.parametrize("style", styles.STYLES)
def test_the_files_fit_the_demo_model(style: str) -> None:
    """Names and shapes of its modules, and small files."""
    assert styles.lora_path(style).stat().st_size < 1e6
    adapter = read_adapter(styles.lora_path(style), {})
    assert adapter.unmatched == []
    assert list(adapter.modules) == ["unet"]
    with safe_open(MODEL_DIR / "unet" / "diffusion_pytorch_model.safetensors", "np") as unet:
        names = {name.removesuffix(".weight").replace(".", "_"): name for name in unet.keys()}  # noqa: SIM118
        for module, weights in adapter.modules["unet"].items():
            delta = weights.delta()
            assert list(delta.shape) == unet.get_slice(names[module]).get_shape()
            assert 0 < np.abs(delta.dense()).max() < 1
