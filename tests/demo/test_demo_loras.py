"""The demo LoRAs: what their styles make of a prompt, and that the files fit the demo model."""

from __future__ import annotations

import random

import numpy as np
import pytest
from safetensors import safe_open

from sd_ort.core.errors import InputError
from sd_ort.demo import MODEL_DIR, scenes, styles
from sd_ort.demo.fidelity import matches
from sd_ort.pipeline.adapters import read_adapter

PROMPT = "a small black star left of a red ring on a cyan background"


@pytest.mark.parametrize(
    ("used", "expected"),
    [
        (["night"], "a small white star left of a red ring on a black background"),
        (["gold"], "a small yellow star left of a yellow ring on a cyan background"),
        (["night", "gold"], "a small yellow star left of a yellow ring on a black background"),
        ([], PROMPT),
    ],
)
def test_a_style_is_read_back_as_the_prompt_that_says_it(used: list[str], expected: str) -> None:
    assert styles.prompt_in(used, PROMPT) == expected
    scene = styles.scene_in(used, scenes.parse(PROMPT))
    picture = scenes.render(scene, scenes.layout(scene, random.Random(0)))
    assert matches(styles.prompt_in(used, PROMPT), picture)
    assert matches(PROMPT, picture) == (not used)
    with pytest.raises(InputError):
        styles.prompt_in(used, "a dog")


def test_every_style_changes_the_prompts_it_is_scored_on() -> None:
    prompts = styles.prompts_to_style(50)
    assert len(set(prompts)) == 50
    for prompt in prompts:
        scene = scenes.parse(prompt)
        assert scenes.is_unseen(scene)
        for name in styles.STYLES:
            styled = styles.scene_in([name], scene)
            assert styled != scene
            assert styled.background not in {item.color for item in styled.items}


@pytest.mark.parametrize("style", styles.STYLES)
def test_the_files_are_of_the_demo_model(style: str) -> None:
    """Its modules, its shapes, and small."""
    assert styles.lora(style).stat().st_size < 1e6
    adapter = read_adapter(styles.lora(style), {})
    assert adapter.left == []
    assert list(adapter.modules) == ["unet"]
    with safe_open(MODEL_DIR / "unet" / "diffusion_pytorch_model.safetensors", "np") as unet:
        names = {name.removesuffix(".weight").replace(".", "_"): name for name in unet.keys()}  # noqa: SIM118
        for module, correction in adapter.modules["unet"].items():
            change = correction.change()
            assert list(change.shape) == unet.get_slice(names[module]).get_shape()
            assert 0 < np.abs(change.dense()).max() < 1
