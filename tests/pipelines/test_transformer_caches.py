"""MagCache and TaylorSeer: the images and the full steps of diffusers' hooks on the demo's FLUX transformer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.hooks import MagCacheConfig as TheirMagCacheConfig
from diffusers.hooks import PyramidAttentionBroadcastConfig
from diffusers.hooks import TaylorSeerCacheConfig as TheirTaylorSeerCacheConfig
from image_metrics import psnr

from sd_ort import FluxPipeline, demo
from sd_ort.core.errors import InputError
from sd_ort.pipelines import cached_transformer
from sd_ort.pipelines.cached_transformer import COMPONENT
from sd_ort.pipelines.mag_cache import MagCacheConfig, nearest
from sd_ort.pipelines.taylor_seer_cache import TaylorSeerCacheConfig
from sd_ort.runtime.bound_run import GpuGraphModel
from sd_ort.runtime.component_opener import ComponentOpener
from sd_ort.runtime.session import ModelOverride, OrtModel

STEPS = 12
CALL: dict[str, Any] = {
    "prompt": "a red circle on a blue background",
    "num_inference_steps": STEPS,
    "output_type": "np",
}
GUIDED: dict[str, Any] = {"true_cfg_scale": 2.0, "negative_prompt": "a blue square"}
RATIOS = [1.0, 1.2, 1.1, 1.02, 1.04, 0.99, 1.01, 1.0, 0.97, 1.03, 0.98, 0.95]
MAG: dict[str, Any] = {"threshold": 0.1, "num_inference_steps": STEPS, "mag_ratios": RATIOS}


@pytest.fixture(scope="module")
def pipeline(demo_dit_folder: Path) -> FluxPipeline:
    pipeline: FluxPipeline = FluxPipeline.from_pretrained(demo_dit_folder, "cpu", threads=1)
    return pipeline


@pytest.fixture(scope="module")
def theirs() -> Any:
    pipeline = diffusers.FluxPipeline.from_pretrained(demo.FOLDERS["demo-dit"], dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw(pipeline: Any, **options: Any) -> np.ndarray:
    image: np.ndarray = pipeline(**{**CALL, **options}, generator=1).images[0]
    return image


def expected_image(theirs: Any, config: Any, module: str, **options: Any) -> tuple[np.ndarray, int]:
    """Return diffusers' image with a cache, and how often a module ran whose hook the cache has not replaced."""
    runs: list[int] = []
    hook = theirs.transformer.get_submodule(module).register_forward_hook(lambda *_: runs.append(1))
    theirs.transformer.enable_cache(config)
    size = {"height": demo.HEIGHT, "width": demo.WIDTH, "max_sequence_length": demo.TEXT_LENGTH}
    generator = torch.Generator().manual_seed(1)
    image: np.ndarray = theirs(**CALL, **size, **options, generator=generator).images[0]
    theirs.transformer.disable_cache()
    hook.remove()
    return image, len(runs)


@pytest.mark.parametrize("guidance", [{}, GUIDED])
def test_mag_cache(guidance: dict[str, Any], pipeline: FluxPipeline, theirs: Any) -> None:
    """Full steps and image equal diffusers', with a cache for each prompt; then the first image returns."""
    first = draw(pipeline, **guidance)
    pipeline.enable_cache(MagCacheConfig(**MAG))
    cached = draw(pipeline, **guidance)
    full_steps = pipeline._cached.full_steps
    assert COMPONENT not in pipeline.models.opened  # its weights are in the whole graph with the residual
    pipeline.disable_cache()
    config = TheirMagCacheConfig(**MAG)
    expected, runs = expected_image(theirs, config, "single_transformer_blocks.0.proj_out", **guidance)
    assert full_steps == runs
    assert 2 < runs < STEPS * (1 + bool(guidance))
    assert psnr(cached, expected) > 80
    assert psnr(cached, first) < 60
    np.testing.assert_array_equal(draw(pipeline, **guidance), first)


def test_ratios_are_measured_as_diffusers_does(
    pipeline: FluxPipeline, theirs: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {"calibrate": True, "num_inference_steps": STEPS}
    pipeline.enable_cache(TheirMagCacheConfig(**settings))  # a config of diffusers is one of ours
    draw(pipeline)
    ratios = pipeline.mag_ratios
    pipeline.disable_cache()
    expected_image(theirs, TheirMagCacheConfig(**settings), "proj_out")
    expected = [float(number) for number in capsys.readouterr().out.split("[")[-1].split("]")[0].split(",")]
    np.testing.assert_allclose(ratios, expected, rtol=1e-4)
    assert len(set(ratios)) == STEPS


def test_steps_of_mag_cache() -> None:
    """Ratios are interpolated as torch rounds; skipped steps are bounded; the first ones are full."""
    for length, count in ((28, 12), (12, 28), (5, 1), (7, 7)):
        grid = torch.arange(count, dtype=torch.float32) * ((length - 1) / max(count - 1, 1))
        expected = torch.round(grid).long().numpy() if count > 1 else [length - 1]
        np.testing.assert_array_equal(nearest(length, count), expected)
    ones = MagCacheConfig(num_inference_steps=10, mag_ratios=[1.0] * 10)
    assert ones.full_steps() == [True, True, False, False, False, True, False, False, False, True]


@pytest.mark.parametrize("settings", [
    {"taylor_factors_dtype": "float32", "max_order": 2},
    {"cache_interval": 3, "disable_cache_after_step": 10},
    {"use_lite_mode": True, "max_order": 2, "cache_interval": 2},
])  # fmt: skip
def test_taylor_seer(settings: dict[str, Any], pipeline: FluxPipeline, theirs: Any) -> None:
    """Full steps of each prompt and the image equal diffusers'; rounding factors to bfloat16 is not linear."""
    first = draw(pipeline, **GUIDED)
    pipeline.enable_cache(TaylorSeerCacheConfig(**settings))
    cached = draw(pipeline, **GUIDED)
    full_steps = pipeline._cached.full_steps
    pipeline.disable_cache()
    dtype = getattr(torch, settings.get("taylor_factors_dtype", "bfloat16"))
    is_lite = settings.get("use_lite_mode", False)
    module = "transformer_blocks.0.ff" if is_lite else "transformer_blocks.0.attn.to_q"
    config = TheirTaylorSeerCacheConfig(**{**settings, "taylor_factors_dtype": dtype})
    expected, runs = expected_image(theirs, config, module, **GUIDED)
    assert full_steps == runs
    assert 6 <= runs < 2 * STEPS
    rounded = dtype == torch.bfloat16 and not is_lite
    assert psnr(cached, expected) > (50 if rounded else 80)
    assert psnr(cached, first) < (45 if rounded else 60)
    np.testing.assert_array_equal(draw(pipeline, **GUIDED), first)


def test_mag_cache_on_a_device(demo_dit_folder: Path, pipeline: FluxPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured over shared buffers: the images of the host, with a second call, and no output but the prediction is
    read. TaylorSeer runs there in its lite mode alone."""

    def as_captured(opener: ComponentOpener, name: str, override: ModelOverride | None = None) -> OrtModel:
        return GpuGraphModel(opener.session(name, override or opener.overrides.of(name)), "cpu")

    pipeline.enable_cache(MagCacheConfig(**MAG))
    expected = draw(pipeline, **GUIDED)
    pipeline.disable_cache()
    monkeypatch.setattr(ComponentOpener, "open", as_captured)
    device = FluxPipeline.from_pretrained(demo_dit_folder, "cpu", threads=1)
    device.enable_cache(MagCacheConfig(**MAG))
    reads: list[tuple[int, ...]] = []

    def read_value(value: Any) -> np.ndarray:
        reads.append(tuple(value.shape()))
        return np.array(value.numpy())

    monkeypatch.setattr(cached_transformer, "read_value", read_value)
    for _ in range(2):
        np.testing.assert_allclose(draw(device, **GUIDED), expected, atol=1e-5)
    assert len(reads) == 2 * 2 * STEPS  # of two calls and two prompts
    assert len(set(reads)) == 1
    with pytest.raises(InputError, match="keeps attentions on the CPU alone: give use_lite_mode=True"):
        device.enable_cache(TaylorSeerCacheConfig())
    assert not device.is_cache_enabled


def test_bad_settings(pipeline: FluxPipeline) -> None:
    """Refused in one line; the pipeline stays as it was."""
    cases = [
        (lambda: MagCacheConfig(), "mag_ratios are missing, which depend on the model: measure them"),
        (lambda: MagCacheConfig(mag_ratios=[]), "mag_ratios must be one number a step, got 0"),
        (lambda: MagCacheConfig(mag_ratios=[float("nan")]), "mag_ratios must be one number a step"),
        (lambda: MagCacheConfig(mag_ratios=["a", None]), "mag_ratios must be one number a step, got "),
        (lambda: MagCacheConfig(threshold=-1, mag_ratios=RATIOS), "threshold must be a number from 0 on"),
        (lambda: MagCacheConfig(retention_ratio=2, mag_ratios=RATIOS), "retention_ratio must be between 0 and 1"),
        (lambda: MagCacheConfig(max_skip_steps=0, mag_ratios=RATIOS), "max_skip_steps must be an integer from 1 on"),
        (lambda: TaylorSeerCacheConfig(cache_interval=0), "cache_interval must be an integer from 1 on"),
        (lambda: TaylorSeerCacheConfig(taylor_factors_dtype=torch.int8), "taylor_factors_dtype must be one of"),
        (lambda: TaylorSeerCacheConfig(cache_identifiers=["x"]), "names of torch modules"),
        (
            lambda: pipeline.enable_cache(PyramidAttentionBroadcastConfig()),
            "PyramidAttentionBroadcastConfig is not supported: use one of FirstBlockCacheConfig, MagCacheConfig",
        ),
        (lambda: pipeline.enable_cache(TaylorSeerCacheConfig(), threshold=0.1), "a config or a threshold"),
    ]  # fmt: skip
    for make, message in cases:
        with pytest.raises(InputError, match=message):
            make()
    assert not pipeline.is_cache_enabled
    pipeline.enable_cache(MagCacheConfig(**MAG))
    with pytest.raises(InputError, match="MagCache was enabled for 12 steps, not 20: enable it with"):
        draw(pipeline, num_inference_steps=20)
    for config in (MagCacheConfig(**{**MAG, "num_inference_steps": 4}), TaylorSeerCacheConfig()):
        pipeline.enable_cache(config)
        with pytest.raises(InputError, match="4 steps are too few to keep blocks between them, as schnell"):
            draw(pipeline, num_inference_steps=4)
    pipeline.disable_cache()
