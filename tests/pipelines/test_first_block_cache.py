"""FirstBlockCache: the image and the decisions of diffusers' hook on the demo's FLUX transformer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from cli_type import Cli
from diffusers.hooks import FirstBlockCacheConfig
from image_metrics import psnr

from scripts.fixtures import parity_models
from sd_ort import FluxPipeline, demo
from sd_ort.checkpoints.checkpoint import build_model, class_name
from sd_ort.core.errors import InputError
from sd_ort.core.pipeline_folder import MODEL
from sd_ort.graphs.block_cache_graphs import keep_head
from sd_ort.graphs.load import load
from sd_ort.pipelines import cached_transformer
from sd_ort.pipelines.cached_transformer import COMPONENT
from sd_ort.runtime.bound_run import GpuGraphModel
from sd_ort.runtime.component_opener import ComponentOpener
from sd_ort.runtime.session import ModelOverride, OrtModel
from sd_ort.stages import optimize

CALL: dict[str, Any] = {"prompt": "a red circle on a blue background", "num_inference_steps": 12, "output_type": "np"}
THRESHOLD = 0.2


@pytest.fixture
def pipeline(demo_dit_folder: Path) -> FluxPipeline:
    pipeline: FluxPipeline = FluxPipeline.from_pretrained(demo_dit_folder, "cpu", threads=1)
    return pipeline


def draw(pipeline: Any, **options: Any) -> np.ndarray:
    image: np.ndarray = pipeline(**CALL, **options, generator=1).images[0]
    return image


@pytest.mark.parametrize("guidance", [{}, {"true_cfg_scale": 2.0, "negative_prompt": "a blue square"}])
def test_the_image_of_diffusers(guidance: dict[str, Any], pipeline: FluxPipeline) -> None:
    """Full steps and image equal diffusers', with a cache for each prompt; without it the first image returns."""
    first = draw(pipeline, **guidance)
    pipeline.enable_cache(threshold=THRESHOLD)
    cached = draw(pipeline, **guidance)
    full_steps = pipeline._cached.full_steps
    assert COMPONENT not in pipeline.models.opened  # its weights are in the two parts

    theirs = diffusers.FluxPipeline.from_pretrained(demo.FOLDERS["demo-dit"], dtype=torch.float32)
    theirs.set_progress_bar_config(disable=True)
    runs: list[int] = []
    theirs.transformer.single_transformer_blocks[-1].proj_out.register_forward_hook(lambda *_: runs.append(1))
    theirs.transformer.enable_cache(FirstBlockCacheConfig(threshold=THRESHOLD))
    generator = torch.Generator().manual_seed(1)
    size = {"height": demo.HEIGHT, "width": demo.WIDTH, "max_sequence_length": demo.TEXT_LENGTH}
    expected = theirs(**CALL, **size, **guidance, generator=generator).images[0]
    assert full_steps == len(runs)
    assert 2 <= len(runs) < 12 * (1 + bool(guidance))
    assert psnr(cached, expected) > 80  # measured 120, the largest
    assert psnr(cached, first) < 60
    pipeline.disable_cache()
    np.testing.assert_array_equal(draw(pipeline, **guidance), first)


def test_the_graphs_of_gpus(tmp_path: Path) -> None:
    """Head and rest of a hoisted float16 graph, with residuals in norms, compute the same as the complete graph."""
    optimize("demo-dit", tmp_path / "gpu", target="gpu", dtype="float16", calibrate=False)
    pipeline = FluxPipeline.from_pretrained(tmp_path / "gpu", "cpu", threads=1)
    first = draw(pipeline)
    pipeline.enable_cache(threshold=1e-9)
    assert psnr(draw(pipeline), first) > 80  # measured 120
    pipeline.enable_cache(threshold=0.999)
    assert psnr(draw(pipeline), first) < 50


def test_a_lora(pipeline: FluxPipeline) -> None:
    """Both parts have its weights: those of the first block, and those behind it."""
    random, lora = torch.Generator().manual_seed(0), {}
    for block in (0, 2):
        name = f"transformer.transformer_blocks.{block}.attn.to_q"
        lora[f"{name}.lora_A.weight"] = torch.randn(2, 192, generator=random) * 0.2
        lora[f"{name}.lora_B.weight"] = torch.randn(192, 2, generator=random) * 0.2
    first = draw(pipeline)
    pipeline.load_lora_weights(lora, "a")
    expected = draw(pipeline)
    pipeline.enable_cache(threshold=1e-9)
    assert psnr(draw(pipeline), expected) > 80
    assert psnr(expected, first) < 50
    pipeline.unload_lora_weights()
    assert psnr(draw(pipeline), first) > 80


def test_bad_settings(sd_ort: Cli, demo_dit_folder: Path, pipeline: FluxPipeline, tmp_path: Path) -> None:
    """Refused in one line; the pipeline stays as it was."""
    for threshold in (0, 1, 3, -0.1, float("nan"), "0.1"):
        with pytest.raises(InputError, match="threshold must be between 0 and 1"):
            pipeline.enable_cache(threshold)
    with pytest.raises(InputError, match="layer x_embedder is not found in the transformer's graph"):
        keep_head(load(demo_dit_folder / COMPONENT / MODEL), {})
    assert not pipeline.is_cache_enabled
    pipeline.enable_cache(0.1)
    with pytest.raises(InputError, match="4 steps are too few to keep blocks between them, as schnell"):
        pipeline("a red circle", num_inference_steps=4)
    arguments = ("generate", "a circle", "--model", demo_dit_folder, "--provider", "cpu", "--out", tmp_path / "a.png")
    code, _, err = sd_ort(*arguments, "--cache", 3)
    assert (code, "threshold must be between 0 and 1, got 3" in err) == (2, True)
    code, _, err = sd_ort(*arguments, "--cache", 0.1, "--steps", 4)
    assert (code, "4 steps are too few" in err) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_the_graphs_on_a_device(pipeline: FluxPipeline, demo_dit_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over shared buffers, captured: the steps and the images of the host, with a second call over the same buffers."""

    def as_captured(opener: ComponentOpener, name: str, override: ModelOverride | None = None) -> OrtModel:
        return GpuGraphModel(opener.session(name, override or opener.overrides.of(name)), "cpu")

    call = {"true_cfg_scale": 2.0, "negative_prompt": "a blue square"}
    pipeline.enable_cache(threshold=THRESHOLD)
    expected = draw(pipeline, **call)
    monkeypatch.setattr(ComponentOpener, "open", as_captured)
    device = FluxPipeline.from_pretrained(demo_dit_folder, "cpu", threads=1)
    device.enable_cache(threshold=THRESHOLD)
    for _ in range(2):
        np.testing.assert_allclose(draw(device, **call), expected, atol=1e-5)
    head = device.models.opened[f"{COMPONENT} first block"]
    assert isinstance(head, GpuGraphModel)
    assert len(cached_transformer.bound_blocks[head]) == 2  # of the prompt and of the negative prompt, for both calls

    other = device(**CALL | {"prompt": "a green square"}, generator=2).images[0]
    first, during = draw(device), list[np.ndarray]()

    def call_again(pipe: FluxPipeline, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == 3:
            during.append(pipe(**CALL | {"prompt": "a green square"}, generator=2).images[0])
        return {}

    np.testing.assert_array_equal(draw(device, callback_on_step_end=call_again), first)  # as of another thread
    np.testing.assert_array_equal(during[0], other)


@pytest.mark.parametrize("family", ["sd3", "klein", "z_image", "krea2"])
def test_the_hook_of_diffusers_does_not_work(family: str) -> None:
    """If this fails, diffusers has a working hook for another family: add it to `graphs/block_cache_graphs.py`."""
    config = parity_models.preset(family).models["transformer"]
    model = build_model(class_name(config), config)
    if family != "klein":
        assert not hasattr(model, "enable_cache")
        return
    model.enable_cache(FirstBlockCacheConfig(threshold=THRESHOLD))
    inputs = {"hidden_states": config["in_channels"], "encoder_hidden_states": config["joint_attention_dim"]}
    tensors = {name: torch.randn(1, 4, width) for name, width in inputs.items()}
    ids = dict.fromkeys(("img_ids", "txt_ids"), torch.zeros(4, 4))
    with model.cache_context("cond"), torch.no_grad(), pytest.raises(TypeError, match="'Tensor' and 'list'"):
        model(**tensors, **ids, timestep=torch.tensor([0.5]))
