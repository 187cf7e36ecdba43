"""Edits of a UNet's graph, exported or fused: sizes that do not halve evenly, and perturbed attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from fusion_passes import weight_recipes
from sd_ort.core.errors import InputError
from sd_ort.core.metrics import relative_l2_error
from sd_ort.core.pipeline_folder import MODEL
from sd_ort.graphs.cpu_emulation import cpu_equivalent
from sd_ort.graphs.load import load, serialize_over_data
from sd_ort.graphs.perturbed_attention import ROWS, perturb_attention, self_attention_layers
from sd_ort.graphs.unet import crop_upsampling
from sd_ort.optimize.optimizer import optimize_component
from sd_ort.optimize.targets import TARGETS
from sd_ort.optimize.unoptimized import file_component
from sd_ort.weights.recipes import read_recipes

# GPU targets merge upsampling with its convolution, and pack the projections of attention.
FUSED = (
    ("portable", "float32", 1e-5), ("cpu", "float16", 3e-3), ("cpu", "bfloat16", 5e-2), ("cuda", "float32", 1e-5),
    ("hip", "float16", 5e-3),
)  # fmt: skip
LAYERS = ["mid", "down_blocks.0"]


def feed(batch: int, height: int, width: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(7)
    return {
        "sample": random.standard_normal((batch, 4, height, width)).astype(np.float32),
        "timestep": np.array([501], np.float32),
        "encoder_hidden_states": random.standard_normal((batch, 9, 64)).astype(np.float32),
    }


def perturbed_rows() -> dict[str, np.ndarray]:
    return feed(3, 8, 16) | {ROWS: np.array([0, 1, 2 + 3])}


def run(folder: Path, edit: Callable[[ir.Model], Any], *feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Run the UNet in `folder` with an edit of its graph, on the CPU."""
    model = load(folder / MODEL)
    edit(model)
    path = folder / "edited.onnx"
    path.write_bytes(serialize_over_data(model, folder))
    with cpu_equivalent(path) as (copy, _):
        session = ort.InferenceSession(copy, providers=["CPUExecutionProvider"])
        return [np.asarray(session.run(None, each)[0], np.float32) for each in feeds]


def perturb(recipes: Any) -> Callable[[ir.Model], None]:
    return lambda model: perturb_attention(model, recipes, self_attention_layers(recipes, LAYERS))


@pytest.fixture(scope="module")
def expected(small_export: Path) -> dict[str, list[np.ndarray]]:
    """diffusers' UNet of the same weights."""
    import torch
    from diffusers import UNet2DConditionModel
    from diffusers.models.attention_processor import PAGCFGIdentitySelfAttnProcessor2_0

    from sd_ort.checkpoints.open import CheckpointOptions, open_checkpoint

    options = CheckpointOptions(preset="sd15-small", random_weights=True)
    unet: UNet2DConditionModel = open_checkpoint(None, options).load("unet")

    @torch.no_grad()
    def call(arrays: dict[str, np.ndarray]) -> np.ndarray:
        tensors = {name: torch.from_numpy(value) for name, value in arrays.items() if name != ROWS}
        sample: np.ndarray = unet(**tensors).sample.numpy()
        return sample

    sizes = [call(feed(*shape)) for shape in SHAPES]
    processors = dict(unet.attn_processors)
    for name in processors:
        if "attn1" in name and ("mid" in name or "down_blocks.0" in name):
            processors[name] = PAGCFGIdentitySelfAttnProcessor2_0()
    plain = call(perturbed_rows())
    unet.set_attn_processor(processors)
    return {"sizes": sizes, "perturbed": [call(perturbed_rows())], "plain": [plain]}


SHAPES = [(1, 8, 8), (2, 9, 13), (1, 10, 7)]


@pytest.fixture(scope="module")
def fused(
    small_export: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], tuple[Path, dict[str, Any]]]:
    """Return the folder and the weight recipes of the UNet that is optimized for a target."""
    out = tmp_path_factory.mktemp("fused")
    cached: dict[tuple[str, str], tuple[Path, dict[str, Any]]] = {}

    def optimized(target: str, dtype: str) -> tuple[Path, dict[str, Any]]:
        if (target, dtype) not in cached:
            path = out / f"{target}-{dtype}" / MODEL
            recipes = read_recipes(small_export)["unet"]
            source = file_component(small_export / "unet" / MODEL, recipes)
            entry = optimize_component(source, path, TARGETS[target], dtype)
            cached[target, dtype] = path.parent, weight_recipes.load(entry["weight_recipes"])
        return cached[target, dtype]

    return optimized


@pytest.mark.parametrize(("target", "dtype", "tolerance"), FUSED)
def test_sizes_that_do_not_halve_evenly(
    fused: Any, expected: dict[str, list[np.ndarray]], target: str, dtype: str, tolerance: float
) -> None:
    folder, _ = fused(target, dtype)
    for result, from_torch in zip(
        run(folder, crop_upsampling, *(feed(*shape) for shape in SHAPES)), expected["sizes"], strict=True
    ):
        assert relative_l2_error(result, from_torch) <= tolerance


@pytest.mark.parametrize(("target", "dtype", "tolerance"), FUSED)
def test_perturbed_rows(
    fused: Any, expected: dict[str, list[np.ndarray]], target: str, dtype: str, tolerance: float
) -> None:
    folder, recipes = fused(target, dtype)
    (result,) = run(folder, perturb(recipes), perturbed_rows())
    assert relative_l2_error(result, expected["perturbed"][0]) <= tolerance
    assert relative_l2_error(result[2:], expected["plain"][0][2:]) > 0.05
    assert relative_l2_error(result[:2], expected["plain"][0][:2]) <= tolerance


def test_layers_by_name(small_export: Path) -> None:
    recipes = read_recipes(small_export)["unet"]
    assert self_attention_layers(recipes, ["mid"]) == ["mid_block.attentions.0.transformer_blocks.0.attn1"]
    with pytest.raises(InputError, match="no self-attention layer matches 'attn2', of down"):
        self_attention_layers(recipes, ["mid", "attn2"])
    with pytest.raises(InputError, match="no regular expression"):
        self_attention_layers(recipes, ["("])
    with pytest.raises(InputError, match="not found in the UNet's graph"):
        perturb_attention(load(small_export / "text_encoder" / MODEL), recipes, self_attention_layers(recipes, ["mid"]))


def test_upsampling_without_skip_connections(small_export: Path) -> None:
    with pytest.raises(InputError, match="no skip connection follows"):
        crop_upsampling(load(small_export / "vae_decoder" / MODEL))
