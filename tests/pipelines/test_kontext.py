"""FLUX.1 Kontext on `demo-dit`: sizes of the training for the image, as in diffusers; refusals. Pairs: tests/parity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.flux import pipeline_flux_kontext
from PIL import Image

from scripts.fixtures.parity_models import Models
from sd_ort import FluxKontextPipeline, transformer_pipeline
from sd_ort.core.errors import InputError
from sd_ort.core.metrics import psnr
from sd_ort.pipelines import transformer_kontext

KIND = "FluxKontextPipeline"
CALL: dict[str, Any] = {"height": 64, "width": 96, "max_area": 64 * 96, "num_inference_steps": 2, "output_type": "np",
                        "max_sequence_length": 32, "prompt": "a red circle"}  # fmt: skip
IMAGE = Image.linear_gradient("L").resize((83, 131)).convert("RGB")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("kontext"))


def test_sizes_of_the_training() -> None:
    theirs = pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS
    assert [*transformer_kontext.TRAINED_SIZES] == theirs


def test_the_image_is_resized_as_in_diffusers(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the size of the nearest ratio, of small sizes here. Another image changes the result."""
    sizes = ((48, 80), (64, 64), (80, 48))
    monkeypatch.setattr(transformer_kontext, "TRAINED_SIZES", sizes)
    monkeypatch.setattr(pipeline_flux_kontext, "PREFERRED_KONTEXT_RESOLUTIONS", [*sizes])
    theirs, ours = models.theirs("flux", KIND), models.ours("flux", KIND)
    with torch.no_grad():
        expected = theirs(IMAGE, **CALL, generator=torch.Generator().manual_seed(5)).images
    assert psnr(ours(IMAGE, **CALL, generator=5).images, expected, 0.01, peak=1.0) >= 60
    turned = IMAGE.transpose(Image.Transpose.ROTATE_180)
    assert psnr(ours(turned, **CALL, generator=5).images, expected, 0.01, peak=1.0) < 50


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_area": 0}, "max_area must be"),
        ({"image": Image.new("RGB", (3, 3))}, "image is smaller than"),
        ({"image": "file.png"}, "no image was given"),
        ({"image": [IMAGE] * 2}, "2 images were given for 1 images"),
    ],
)
def test_arguments_are_rejected_by_name(models: Models, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        models.ours("flux", KIND)(**{"image": IMAGE, "_auto_resize": False, **CALL, **arguments})


def test_tasks() -> None:
    """Images are read in every task except inpainting."""
    assert transformer_pipeline(KIND, "Img2Img") == transformer_pipeline(KIND, "") == KIND
    with pytest.raises(InputError, match="Kontext has no inpainting"):
        transformer_pipeline(KIND, "Inpaint")


def test_a_folder_of_another_family(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusion3Pipeline"}')
    with pytest.raises(InputError, match="holds a StableDiffusion3Pipeline, not a FluxKontextPipeline"):
        FluxKontextPipeline.check_folder(tmp_path)


def test_text_alone_is_flux(models: Models) -> None:
    """Without an image, the images are those of FluxPipeline."""
    call = {name: value for name, value in CALL.items() if name != "max_area"}
    expected = models.ours("flux", "FluxPipeline")(**call, generator=3).images
    np.testing.assert_array_equal(models.ours("flux", KIND)(**CALL, generator=3).images, expected)
