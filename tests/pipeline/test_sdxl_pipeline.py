"""SDXL: both text encoders, added conditioning, negative prompts, image to image, as diffusers draws them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from minis import mini
from pictures import psnr
from PIL import Image

from sd_ort import StableDiffusionImg2ImgPipeline, StableDiffusionInpaintPipeline, StableDiffusionPipeline
from sd_ort.benchmark.engines.pytorch import torch_pipeline
from sd_ort.export.exporter import export
from sd_ort.family.presets import PRESETS
from sd_ort.merge import merge
from sd_ort.optimize.optimizer import optimize
from sd_ort.pipeline.merged import MergedPipeline

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
    PRESETS["sdxl-mini"] = mini(PRESETS["sdxl-tiny"])
    yield "sdxl-mini"
    del PRESETS["sdxl-mini"]


@pytest.fixture(scope="module")
def sdxl(preset: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdxl") / "raw"
    export(None, out, preset=preset, random_weights=True, exporter="torchscript", opset=20)
    return out


@pytest.fixture(scope="module")
def reference(preset: str) -> Any:
    return torch_pipeline(preset, random_weights=True, seed=0)


@pytest.mark.parametrize("negative", [None, "", "blurry"], ids=["zeros", "empty", "text"])
def test_same_seed_same_image(sdxl: Path, reference: Any, negative: str | None) -> None:
    expected = draw(reference, generator=seed(7), negative_prompt=negative, **SIZE)
    ours = StableDiffusionPipeline.from_pretrained(sdxl)
    assert psnr(draw(ours, generator=7, negative_prompt=negative, **SIZE), expected) > MIN_PSNR


@pytest.mark.parametrize("kind", ["Img2Img", "Inpaint"])
def test_from_a_picture(sdxl: Path, reference: Any, kind: str) -> None:
    y, x = np.mgrid[:32, :48]
    picture = Image.fromarray(np.stack([4 * x, 6 * y, 255 - 2 * x - 2 * y], -1).astype(np.uint8))
    arguments: dict[str, Any] = {"image": picture, "strength": 0.7}
    if kind == "Inpaint":
        mask = Image.fromarray((255 * (x > 20)).astype(np.uint8))
        arguments |= {"mask_image": mask, **SIZE}
    theirs = getattr(diffusers, f"StableDiffusionXL{kind}Pipeline")(**reference.components)
    theirs.set_progress_bar_config(disable=True)
    ours = (StableDiffusionImg2ImgPipeline if kind == "Img2Img" else StableDiffusionInpaintPipeline).from_pretrained(
        sdxl
    )
    expected = draw(theirs, generator=seed(5), **arguments)
    assert psnr(draw(ours, generator=5, **arguments), expected) > MIN_PSNR


def test_hoisted_and_merged(sdxl: Path, tmp_path: Path) -> None:
    names = ["text_encoder", "text_encoder_2", "unet", "vae_decoder"]
    optimize(sdxl, tmp_path / "hoisted", components=names, hoisted=True)
    merge(tmp_path / "hoisted", tmp_path / "merged")
    pipelines = [
        StableDiffusionPipeline.from_pretrained(sdxl),
        StableDiffusionPipeline.from_pretrained(tmp_path / "hoisted"),
        MergedPipeline.from_pretrained(tmp_path / "merged"),
    ]
    for negative in (None, "blurry"):  # None: zeros take the place of an embedding
        plain, hoisted, merged = (draw(p, generator=7, negative_prompt=negative, **SIZE) for p in pipelines)
        assert psnr(hoisted, plain) > 80
        assert psnr(merged, plain) > 80
