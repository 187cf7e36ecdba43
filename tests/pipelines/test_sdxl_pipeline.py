"""SDXL: base and refiner, hoisted and merged folders; tests/parity compares the arguments with diffusers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from image_metrics import psnr
from small_presets import mini

from sd_ort import StableDiffusionImg2ImgPipeline, StableDiffusionPipeline
from sd_ort.checkpoints.presets import PRESETS
from sd_ort.checkpoints.torch_pipeline import torch_pipeline
from sd_ort.export.exporter import export
from sd_ort.integrations.diffusers import OrtTextEncoder, OrtUNet, OrtVae, accelerate
from sd_ort.optimize.merge import merge
from sd_ort.pipelines.merged import MergedPipeline
from sd_ort.stages import optimize

SETTINGS: dict[str, Any] = {
    "prompt": "a red circle on a blue background",
    "num_inference_steps": 3,
    "guidance_scale": 4.0,
    "output_type": "np",
}
SIZE = {"height": 32, "width": 48}
MIN_PSNR = 60.0


def draw(pipeline: Any, **arguments: Any) -> np.ndarray:
    return np.asarray(pipeline(**{**SETTINGS, **arguments}).images)


def seed(value: int) -> torch.Generator:
    return torch.Generator().manual_seed(value)


@pytest.fixture(scope="module")
def preset() -> Iterator[str]:
    """SDXL with two resolutions: all that this file is about, in a tenth of the time of `sdxl-tiny`."""
    PRESETS["sdxl-of-this-file"] = mini(PRESETS["sdxl-tiny"])
    yield "sdxl-of-this-file"
    del PRESETS["sdxl-of-this-file"]


@pytest.fixture(scope="module")
def sdxl(preset: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdxl") / "raw"
    export(None, out, preset=preset, random_weights=True, exporter="torchscript", opset=20)
    return out


@pytest.fixture(scope="module")
def reference(preset: str) -> Any:
    return torch_pipeline(preset, random_weights=True, seed=0)


@pytest.fixture(scope="module")
def ours(sdxl: Path) -> Any:
    return StableDiffusionPipeline.from_pretrained(sdxl)


def test_base_and_refiner(sdxl: Path, ours: Any, reference: Any) -> None:
    """The base draws 60 % of the schedule and hands latents on, another pipeline the rest of it."""
    call = {"num_inference_steps": 5, "denoising_end": 0.6, "output_type": "latent", **SIZE}
    latents = [p(**{**SETTINGS, **call}, generator=seed(7)).images for p in (ours, reference)]
    torch.testing.assert_close(latents[0], latents[1], rtol=1e-3, atol=1e-3)
    theirs = diffusers.StableDiffusionXLImg2ImgPipeline(**reference.components)
    theirs.set_progress_bar_config(disable=True)
    rest = {"image": latents[1], "num_inference_steps": 5, "denoising_start": 0.6}
    expected = draw(theirs, generator=seed(5), **rest)
    for looped in (False, True):
        refiner = StableDiffusionImg2ImgPipeline.from_pretrained(sdxl, device_loop=looped)
        assert psnr(draw(refiner, generator=5, **rest), expected) > MIN_PSNR


def test_hoisted_and_merged(sdxl: Path, tmp_path: Path) -> None:
    names = ["text_encoder", "text_encoder_2", "unet", "vae_decoder"]
    optimize(sdxl, tmp_path / "hoisted", components=names, hoist=True)
    merge(tmp_path / "hoisted", tmp_path / "merged")
    pipelines = [
        StableDiffusionPipeline.from_pretrained(sdxl),
        StableDiffusionPipeline.from_pretrained(tmp_path / "hoisted", device_loop=True),
        MergedPipeline.from_pretrained(tmp_path / "merged"),
    ]
    for negative in (None, "blurry"):  # None: zeros take the place of an embedding
        plain, hoisted, merged = (draw(p, generator=7, negative_prompt=negative, **SIZE) for p in pipelines)
        assert psnr(hoisted, plain) > 80
        assert psnr(merged, plain) > 80


def test_base_and_refiner_in_diffusers(sdxl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first steps by the base and the last by the refiner, whose UNet and text encoder are others."""
    monkeypatch.setitem(PRESETS, "refiner-mini", mini(PRESETS["sdxl-refiner-tiny"]))
    monkeypatch.setitem(PRESETS, "sdxl-mini", mini(PRESETS["sdxl-tiny"]))
    names = ["text_encoder_2", "unet"]
    export(None, tmp_path / "raw", preset="refiner-mini", random_weights=True, exporter="torchscript", components=names)
    images = []
    for accelerated in (False, True):
        base, refiner = (torch_pipeline(name, random_weights=True) for name in ("sdxl-mini", "refiner-mini"))
        if accelerated:
            accelerate(base, sdxl, provider="cpu")
            accelerate(refiner, tmp_path / "raw", provider="cpu")
            assert {type(refiner.unet), type(refiner.text_encoder_2), type(base.vae)} == {
                OrtUNet,
                OrtTextEncoder,
                OrtVae,
            }
        arguments = {**SETTINGS, "num_inference_steps": 4}
        halfway = base(**arguments | {"output_type": "latent"}, denoising_end=0.5, generator=seed(3), **SIZE).images
        images.append(np.asarray(refiner(**arguments, denoising_start=0.5, image=halfway, generator=seed(3)).images))
    assert psnr(images[1], images[0]) > MIN_PSNR
