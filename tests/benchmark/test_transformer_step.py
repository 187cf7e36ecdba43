"""The benchmark of transformer steps: torch and the graph read the same inputs, and every recipe can be evaluated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from fusion_passes import weight_recipes
from scripts.bench import bench_transformer_step as bench
from sd_ort.checkpoints.checkpoint import build_model
from sd_ort.checkpoints.modules import wrap
from sd_ort.checkpoints.presets import PRESETS
from sd_ort.checkpoints.random_weights import fill_random
from sd_ort.core.metrics import array_errors

TINY = ["flux-dev", "flux2-klein-4b", "sd35-medium", "z-image-turbo", "qwen-image", "krea2"]


def model_of(preset: str) -> Any:
    config = PRESETS[preset].models["transformer"]
    model = build_model(config["_class_name"], config)
    fill_random(model, 0)
    return model.eval()


@pytest.mark.parametrize("preset", [f"{name}-tiny" for name in TINY])
def test_both_sides_have_the_same_output(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exported module and diffusers' forward have equal outputs for the inputs of the benchmark."""
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    inputs = bench.random_inputs(preset, 128, 2)
    model = model_of(preset)
    with torch.no_grad():
        expected = bench.Net(model, list(inputs))(*inputs.values())
        actual = wrap("transformer", model_of(preset), False, False)(*inputs.values())
    assert array_errors(actual.numpy(), expected.numpy())["nmse"] <= 1e-11


def test_recipes_on_the_device_are_those_of_the_package() -> None:
    random = np.random.default_rng(0)
    a, b = (random.normal(size=(6, 4, 3, 2, 2)).astype(np.float32) for _ in range(2))
    vector = random.normal(size=6).astype(np.float32)
    tensors: Mapping[str, np.ndarray] = {"a": a, "b": b, "v": vector}
    recipes: list[Any] = [["last_frame", None, "a"], ["add", None, "a", "b"], ["scale", None, "a", "v"],
                          ["times", 0.5, "a"], ["plus", 1.0, "a"], ["concat", None, "a", "b"], ["rows", [1, 3], "a"],
                          ["columns", [1, 3], "a"], ["transpose", [4, 0, 1, 2, 3], "a"]]  # fmt: skip
    for recipe in recipes:
        weight = bench.evaluate(recipe, {name: torch.from_numpy(array) for name, array in tensors.items()})
        np.testing.assert_allclose(weight.numpy(), weight_recipes.evaluate(recipe, tensors.__getitem__), rtol=1e-6)
