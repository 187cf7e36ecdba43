"""Every argument of diffusers' pipelines is taken, and does what it does there, or is refused with a reason."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.callbacks import SDCFGCutoffCallback
from image_metrics import psnr
from PIL import Image

import sd_ort
from sd_ort import StableDiffusionImg2ImgPipeline, StableDiffusionInpaintPipeline, StableDiffusionPipeline
from sd_ort.benchmark.engines.pytorch import torch_pipeline
from sd_ort.checkpoints.schedulers import make_scheduler
from sd_ort.core.errors import InputError
from sd_ort.pipelines.request import IMAGE_ARGUMENTS, UNSUPPORTED_ARGUMENTS, Request

PROMPT = "a red circle on a blue background"
SETTINGS: dict[str, Any] = {"num_inference_steps": 2, "guidance_scale": 4.0, "height": 64, "width": 64}
MIN_PSNR = 60.0  # dB, of fp32 pictures in 0..1; measured: above 90

THEIRS = {
    StableDiffusionPipeline: ["", "XL", "ControlNet", "XLControlNet"],
    StableDiffusionImg2ImgPipeline: ["Img2Img", "XLImg2Img", "ControlNetImg2Img", "XLControlNetImg2Img"],
    StableDiffusionInpaintPipeline: ["Inpaint", "XLInpaint", "ControlNetInpaint", "XLControlNetInpaint"],
}
NAMES = [(ours, f"StableDiffusion{kind}Pipeline") for ours, kinds in THEIRS.items() for kind in kinds]
NAMES += [
    (StableDiffusionPipeline, "LatentConsistencyModelPipeline"),
    (StableDiffusionImg2ImgPipeline, "LatentConsistencyModelImg2ImgPipeline"),
]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def reference() -> Any:
    """The diffusers pipeline that `small_export` was exported from, with a scheduler that takes any schedule."""
    made = torch_pipeline("sd15-small", random_weights=True, seed=0)
    made.scheduler = diffusers.EulerDiscreteScheduler.from_config(made.scheduler.config)
    return made


@pytest.fixture(scope="module")
def pipeline(small_export: Path) -> StableDiffusionPipeline:
    made: StableDiffusionPipeline = StableDiffusionPipeline.from_pretrained(small_export, scheduler="euler")
    return made


@pytest.fixture(scope="module")
def plain(pipeline: Any) -> np.ndarray:
    return draw(pipeline)


def draw(pipeline: Any, **arguments: Any) -> np.ndarray:
    """Pictures (B, H, W, 3) in 0..1 of either pipeline."""
    generator = torch.Generator().manual_seed(7)
    given = {"generator": generator, "output_type": "np", **SETTINGS, **arguments}
    if "prompt_embeds" not in given:
        given = {"prompt": PROMPT, **given}
    return np.asarray(pipeline(**given)[0])


def taken(ours: Any) -> set[str]:
    return {field.name for field in fields(Request) if field.init} - set(ours.REJECTED_ARGUMENTS)


# --- Names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ours", "theirs"), NAMES, ids=[name for _, name in NAMES])
def test_every_name_is_taken_or_refused_with_a_reason(ours: Any, theirs: str) -> None:
    signature = inspect.signature(getattr(diffusers, theirs).__call__)
    names = signature.parameters.keys() - {"self"}
    assert getattr(sd_ort, theirs) is ours
    assert not names - taken(ours) - UNSUPPORTED_ARGUMENTS.keys()
    assert not taken(ours) & UNSUPPORTED_ARGUMENTS.keys()
    first = [name for name in inspect.signature(ours.__call__).parameters if name not in ("self", "arguments")]
    assert set(first) <= taken(ours)
    if theirs.startswith("StableDiffusion") and "ControlNet" not in theirs:  # others have them in another order
        assert [name for name in signature.parameters if name in first] == first


@pytest.mark.parametrize("name", sorted(UNSUPPORTED_ARGUMENTS))
def test_a_refused_name_is_answered_with_its_reason(pipeline: Any, name: str) -> None:
    with pytest.raises(InputError, match="is not taken") as refusal:
        draw(pipeline, **{name: 1})
    assert UNSUPPORTED_ARGUMENTS[name] in str(refusal.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"guidence_scale": 3}, "no argument of a pipeline: guidance_scale is"),
        ({"strength": 0.5}, f"use {IMAGE_ARGUMENTS['strength']}"),
        ({"prompt_embeds": torch.zeros(1, 77, 3)}, r"\[prompts, tokens, 64\]"),
        ({"negative_prompt_embeds": torch.zeros(1, 9, 64)}, "differ in shape"),
        ({"negative_prompt_embeds": torch.zeros(1, 77, 64), "negative_prompt": "x"}, "say the same"),
        ({"cross_attention_kwargs": {"gligen": 1}}, "'gligen' is unknown"),
        ({"callback_on_step_end_tensor_inputs": ["prompt_embeds"]}, "the latents alone"),
        ({"callback_on_step_end": SDCFGCutoffCallback(0.4)}, "the latents alone"),
        ({"timesteps": [900, 1], "sigmas": [3.0, 1.0]}, "give one of them"),
        ({"original_inference_steps": 40}, "EulerDiscreteScheduler takes no original_inference_steps"),
        ({"denoising_end": 1.5}, "no part of the schedule"),
        ({"control_guidance_start": 0.5, "image": Image.new("RGB", (64, 64))}, "no ControlNet"),
        ({"prompt": None}, "no prompt was given"),
    ],
)
def test_arguments_that_do_not_fit(pipeline: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        draw(pipeline, **arguments)


# --- What they do ---------------------------------------------------------------------------------------------------


def embeddings(reference: Any) -> dict[str, Any]:
    positive, negative = reference.encode_prompt("two green squares", "cpu", 1, True, "blurry")
    return {"prompt_embeds": positive, "negative_prompt_embeds": negative}


@pytest.mark.parametrize(
    "arguments",
    [
        {"guidance_rescale": 0.7},
        {"timesteps": [900, 300]},
        {"sigmas": [12.0, 4.0, 0.3]},
        {"prompt_embeds": "both"},
        {"prompt": ["a", "b"], "num_images_per_prompt": 2, "negative_prompt": ["c", "d"]},
    ],
    ids=["guidance_rescale", "timesteps", "sigmas", "embeddings", "batch"],
)
def test_as_diffusers(reference: Any, pipeline: Any, plain: np.ndarray, arguments: dict[str, Any]) -> None:
    given = embeddings(reference) if "prompt_embeds" in arguments else arguments
    ours = draw(pipeline, **given)
    assert psnr(ours, draw(reference, **given)) > MIN_PSNR
    assert len(ours) > 1 or psnr(ours, plain) < 50, "without effect"


@pytest.mark.parametrize("arguments", [{"guidance_rescale": 0.7}, {"timesteps": [900, 300]}], ids=str)
def test_on_the_device(pipeline: Any, arguments: dict[str, Any]) -> None:
    looped = StableDiffusionPipeline.from_pipe(pipeline)
    looped.device_loop = True
    assert psnr(draw(looped, **arguments, progress=False), draw(pipeline, **arguments)) > 80
    assert looped.loop.buffer_cache


def test_encode_prompt(reference: Any, pipeline: Any, plain: np.ndarray) -> None:
    """What it gives can be given, and is what diffusers gives."""
    arguments = (PROMPT, "cpu", 1, True, "")
    for ours, theirs in zip(pipeline.encode_prompt(*arguments), reference.encode_prompt(*arguments), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    positive, negative = pipeline.encode_prompt(*arguments)
    np.testing.assert_array_equal(draw(pipeline, prompt_embeds=positive, negative_prompt_embeds=negative), plain)
    assert pipeline.encode_prompt(PROMPT, None, 2, False)[0].shape[0] == 2
    assert pipeline.encode_prompt(PROMPT, None, 2, False)[1] is None


def test_results_unpack_as_in_diffusers(pipeline: Any) -> None:
    quick = {**SETTINGS, "num_inference_steps": 1, "output_type": "latent"}
    output = pipeline(PROMPT, **quick, generator=1)
    pair = pipeline(PROMPT, **quick, generator=1, return_dict=False)
    images, flags = output
    assert (type(pair), len(pair), flags) == (tuple, 2, None)
    for found in (output[0], output["images"], output.images, pair[0]):
        torch.testing.assert_close(found, images, rtol=0, atol=0)


def test_a_callback_may_end_the_loop(reference: Any, pipeline: Any) -> None:
    steps: list[int] = []

    def stop(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        steps.append(step)
        pipe._interrupt = step == 0
        assert pipe.num_timesteps == 4
        return tensors

    drawn, expected = (draw(each, num_inference_steps=4, callback_on_step_end=stop) for each in (pipeline, reference))
    assert steps == [0, 0]
    assert psnr(drawn, expected) > MIN_PSNR
    assert psnr(drawn, draw(pipeline, num_inference_steps=4)) < 50


@pytest.mark.parametrize("kind", ["array", "bytes", "tensor", "latents", "list"])
def test_kinds_of_pictures(pipeline: Any, reference: Any, kind: str) -> None:
    y, x = np.mgrid[:64, :64]
    pixels = np.stack([4 * x, 4 * y, 255 - 2 * (x + y)], -1).astype(np.uint8)
    unit = pixels.astype(np.float32) / 255
    tensor = torch.from_numpy(unit).permute(2, 0, 1)[None]
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    picture, same = {
        "array": (unit, unit[None]),
        "bytes": (pixels, Image.fromarray(pixels)),
        "tensor": (tensor, tensor),
        "latents": (latents, latents),
        "list": ([Image.fromarray(pixels)], Image.fromarray(pixels)),
    }[kind]
    theirs = diffusers.StableDiffusionImg2ImgPipeline(**reference.components)
    theirs.set_progress_bar_config(disable=True)
    ours = StableDiffusionImg2ImgPipeline.from_pipe(pipeline)
    drawn = draw(ours, image=picture, strength=0.7, height=None, width=None)
    settings = {name: value for name, value in SETTINGS.items() if name not in ("height", "width")}
    generator = torch.Generator().manual_seed(7)
    expected = theirs(PROMPT, image=same, strength=0.7, generator=generator, output_type="np", **settings).images
    assert psnr(drawn, expected) > MIN_PSNR


def test_padding_mask_crop(pipeline: Any, reference: Any) -> None:
    """Only the mask's surroundings are drawn, enlarged, and laid over the picture."""
    y, x = np.mgrid[:64, :64]
    picture = Image.fromarray(np.stack([4 * x, 4 * y, 255 - 2 * (x + y)], -1).astype(np.uint8))
    mask = Image.fromarray((255 * ((x > 20) & (x < 40) & (y > 24) & (y < 36))).astype(np.uint8))
    theirs = diffusers.StableDiffusionInpaintPipeline(**reference.components)
    theirs.set_progress_bar_config(disable=True)
    ours = StableDiffusionInpaintPipeline.from_pipe(pipeline)
    given = {"image": picture, "mask_image": mask, "padding_mask_crop": 4, "output_type": "pil"}
    drawn, expected = draw(ours, **given) / 255, draw(theirs, **given) / 255
    assert psnr(drawn, expected) > 45  # bytes
    np.testing.assert_array_equal(drawn[0][:10], np.asarray(picture)[:10] / 255)


# --- What is there beside drawing -----------------------------------------------------------------------------------


def test_components_and_configs(pipeline: Any, reference: Any) -> None:
    assert pipeline.components.keys() >= {"vae", "text_encoder", "tokenizer", "unet", "scheduler"}
    assert pipeline.config._class_name == "StableDiffusionPipeline"
    assert pipeline.unet.config.in_channels == reference.unet.config.in_channels
    assert pipeline.text_encoder.config.hidden_size == reference.text_encoder.config.hidden_size
    assert pipeline.tokenizer("a red").input_ids == reference.tokenizer("a red").input_ids
    assert (pipeline.dtype, pipeline.vae.dtype, pipeline.device.type) == (torch.float32, torch.float32, "cpu")
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference.vae.decode(latents).sample
    torch.testing.assert_close(pipeline.vae.decode(latents).sample, expected, rtol=1e-3, atol=1e-4)
    pixels = expected.clamp(-1, 1)
    with torch.no_grad():
        mean = reference.vae.encode(pixels).latent_dist.mean
    torch.testing.assert_close(pipeline.vae.encode(pixels).latent_dist.mean, mean, rtol=1e-3, atol=1e-3)


def test_places_and_settings(small_export: Path, pipeline: Any) -> None:
    assert pipeline.to("cpu") is pipeline.to(torch.float32) is pipeline
    for place, message in (("cuda", "provider="), (torch.float16, "--float16")):
        with pytest.raises(InputError, match=message):
            pipeline.to(place)
    for options, message in (
        ({"torch_dtype": torch.float16}, "--float16"),
        ({"variant": "fp16"}, "--float16"),
        ({"device_map": "auto"}, "provider="),
        ({"thread": 2}, "takes no thread; of a session it takes .*threads"),
    ):
        with pytest.raises(InputError, match=message):
            StableDiffusionPipeline.from_pretrained(small_export, low_memory=True, **options)
    plain = StableDiffusionPipeline.from_pretrained(
        small_export, torch_dtype=torch.float32, use_safetensors=True, safety_checker=None, low_memory=True
    )
    plain.enable_vae_tiling()
    plain.enable_vae_slicing()
    assert (plain.vae.use_tiling, plain.vae.use_slicing) == (True, True)
    plain.disable_vae_tiling()
    assert not plain.vae.use_tiling
    plain.enable_attention_slicing()
    assert not hasattr(plain, "load_ip_adapter")
    with pytest.raises(InputError, match=r"nothing for torch\.compile to do"):
        plain.unet = torch.nn.Identity()
    with pytest.raises(InputError, match="no such file"):
        StableDiffusionPipeline.from_single_file("a.safetensors")
    with pytest.raises(AttributeError, match="low_memory=True"):
        plain.enable_model_cpu_offload()


def test_progress_bar_can_be_turned_off(small_export: Path, pipeline: Any, capsys: pytest.CaptureFixture[str]) -> None:
    other = StableDiffusionPipeline.from_pipe(pipeline)
    other.set_progress_bar_config(disable=True)
    draw(other, num_inference_steps=1)
    assert "step" not in capsys.readouterr().err
    draw(pipeline, num_inference_steps=1)
    assert "step" in capsys.readouterr().err


def test_another_pipeline_and_a_copy(small_export: Path, tmp_path: Path, pipeline: Any, plain: np.ndarray) -> None:
    drawing = StableDiffusionImg2ImgPipeline.from_pipe(pipeline)
    assert drawing.models is pipeline.models
    pipeline.save_pretrained(tmp_path / "copy")
    copy = StableDiffusionPipeline.from_pretrained(tmp_path / "copy", scheduler=make_scheduler(small_export, "euler"))
    np.testing.assert_array_equal(draw(copy), plain)
    copy.scheduler = diffusers.DDIMScheduler.from_config(copy.scheduler.config)
    assert psnr(draw(copy), plain) < 50
