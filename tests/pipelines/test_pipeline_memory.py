"""Large images in tiles, batches in slices, one component at a time, and the optional safety checker."""

from __future__ import annotations

import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from sd_ort import StableDiffusionImg2ImgPipeline, StableDiffusionPipeline
from sd_ort.checkpoints.torch_pipeline import torch_pipeline
from sd_ort.core.pipeline_folder import MODEL
from sd_ort.pipelines import tiling
from sd_ort.runtime.component_opener import ComponentOpener
from sd_ort.runtime.session import OrtModel

SETTINGS: dict[str, Any] = {
    "prompt": "a red circle",
    "height": 64,
    "width": 64,
    "num_inference_steps": 2,
    "output_type": "np",
    "generator": 7,
}


@pytest.fixture(scope="module")
def vae() -> Any:
    """diffusers' VAE of `small_export`, tiling; its tiles are 128 pixels, 16 of the latent."""
    vae = torch_pipeline("sd15-small", random_weights=True).vae
    vae.enable_tiling()
    return vae


@pytest.mark.parametrize("size", [(24, 40), (16, 17), (28, 16)], ids=str)
def test_tiled_decode_is_that_of_diffusers(small_export: Path, vae: Any, size: tuple[int, int]) -> None:
    latents = torch.randn(1, 4, *size, generator=torch.Generator().manual_seed(0))
    tiled = StableDiffusionPipeline.from_pretrained(small_export, vae_tiling=True)
    with torch.no_grad():
        expected = vae.decode(latents / vae.config.scaling_factor).sample
    torch.testing.assert_close(tiled.decode(latents), expected, rtol=1e-3, atol=1e-4)
    untiled = StableDiffusionPipeline.from_pretrained(small_export).decode(latents)
    assert (untiled - expected).abs().max() > 1e-3, "these sizes are not tiled at all"


def test_tiled_encode_is_that_of_diffusers(small_export: Path, vae: Any) -> None:
    pixels = torch.rand(1, 3, 192, 256, generator=torch.Generator().manual_seed(0)) * 2 - 1
    tiled = StableDiffusionImg2ImgPipeline.from_pretrained(small_export, vae_tiling=True, low_memory=True)
    with torch.no_grad():
        sampled = vae.encode(pixels).latent_dist.sample(torch.Generator().manual_seed(1)) * vae.config.scaling_factor
    ours = tiled.vae.to_latents(pixels.numpy(), torch.Generator().manual_seed(1))
    torch.testing.assert_close(torch.from_numpy(ours), sampled, rtol=1e-3, atol=1e-4)


def test_tiles_of_a_map_that_keeps_pixels() -> None:
    """Blending equal images changes nothing, whatever the sizes."""
    for height, width in ((16, 16), (17, 40), (64, 5), (33, 47)):
        x = np.random.default_rng(0).standard_normal((2, 3, height, width)).astype(np.float32)
        seen: list[tuple[int, ...]] = []

        def double(part: np.ndarray, seen: list[tuple[int, ...]] = seen) -> np.ndarray:
            seen.append(part.shape)
            return part.repeat(2, 2).repeat(2, 3)

        np.testing.assert_allclose(
            tiling.run_in_tiles(double, x, 16, 32), x.repeat(2, 2).repeat(2, 3), rtol=1e-6, atol=1e-6
        )
        assert max(max(shape[2:]) for shape in seen) <= 16


def test_slices_generate_the_same_image(small_export: Path) -> None:
    arguments = {**SETTINGS, "num_images_per_prompt": 3}
    sliced = StableDiffusionPipeline.from_pretrained(small_export, vae_slicing=True)
    rows: list[int] = []
    decoder = sliced.vae_decoder

    class Counting:
        def __call__(self, latent_sample: np.ndarray) -> dict[str, np.ndarray]:
            rows.append(len(latent_sample))
            return decoder(latent_sample=latent_sample)

    sliced.vae_decoder = Counting()
    unsliced = StableDiffusionPipeline.from_pretrained(small_export)
    np.testing.assert_allclose(sliced(**arguments).images, unsliced(**arguments).images, atol=1e-4)
    assert rows == [1, 1, 1]


def test_low_memory_keeps_one_component(small_export: Path) -> None:
    frugal = StableDiffusionPipeline.from_pretrained(small_export, low_memory=True)
    assert frugal.models.opened == {}
    opened: list[list[str]] = []
    image = frugal(**SETTINGS, callback_on_step_end=lambda *_: opened.append(list(frugal.models.opened)) or {}).images
    assert opened
    assert all(names == ["unet"] for names in opened)
    assert list(frugal.models.opened) == ["vae_decoder"]
    np.testing.assert_array_equal(image, StableDiffusionPipeline.from_pretrained(small_export)(**SETTINGS).images)


def test_safety_checker(small_export: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A checker that flags the second image of a batch; without the component, or switched off, none is checked."""
    out = Path(shutil.copytree(small_export, tmp_path / "copy", ignore=shutil.ignore_patterns("vae_encoder")))
    (out / "safety_checker").mkdir()
    graph = helper.make_graph(
        [
            helper.make_node("Identity", ["images"], ["out_images"]),
            helper.make_node("Shape", ["clip_input"], ["count"], start=0, end=1),
            helper.make_node("Squeeze", ["count"], ["scalar"]),
            helper.make_node("Range", ["zero", "scalar", "one"], ["numbers"]),
            helper.make_node("Equal", ["numbers", "one"], ["has_nsfw_concepts"]),
        ],
        "checker",
        [
            helper.make_tensor_value_info("clip_input", TensorProto.FLOAT, ["batch", 3, 224, 224]),
            helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", "height", "width", 3]),
        ],
        [
            helper.make_tensor_value_info("out_images", TensorProto.FLOAT, ["batch", "height", "width", 3]),
            helper.make_tensor_value_info("has_nsfw_concepts", TensorProto.BOOL, ["batch"]),
        ],
        [helper.make_tensor("zero", TensorProto.INT64, [], [0]), helper.make_tensor("one", TensorProto.INT64, [], [1])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.save(model, out / "safety_checker" / MODEL)
    arguments = {**SETTINGS, "num_images_per_prompt": 2}
    result = StableDiffusionPipeline.from_pretrained(out)(**arguments)
    assert result.nsfw_content_detected == [False, True]
    assert result.images[0].any()
    assert not result.images[1].any()
    assert "flagged 1 of 2 images" in caplog.text
    for folder, options in ((out, {"safety_checker": False}), (small_export, {})):
        unchecked = StableDiffusionPipeline.from_pretrained(folder, **options)(**arguments)
        assert unchecked.nsfw_content_detected is None
        assert unchecked.images[1].any()


def test_threads_open_a_component_once(small_export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = StableDiffusionPipeline.from_pretrained(small_export).models
    models.opened.clear()
    is_opening, opened, open_one = threading.Event(), list[str](), ComponentOpener.open

    def open_slowly(opener: ComponentOpener, name: str, *arguments: Any, **named: Any) -> OrtModel:
        opened.append(name)
        is_opening.set()
        time.sleep(0.2)  # for the other thread to come here too, if it may
        return open_one(opener, name, *arguments, **named)

    monkeypatch.setattr(ComponentOpener, "open", open_slowly)
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(models.__getitem__, "vae_decoder")
        assert is_opening.wait(60)
        model = models["vae_decoder"]
    assert model is other.result()
    assert opened == ["vae_decoder"]
