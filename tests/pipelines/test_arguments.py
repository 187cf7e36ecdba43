"""Every argument of diffusers' pipelines is taken, and does what it does there, or is refused with a reason."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.callbacks import SDXLCFGCutoffCallback
from image_metrics import psnr
from PIL import Image

import sd_ort
from scripts.fixtures import parity_pairs
from sd_ort import StableDiffusionImg2ImgPipeline, StableDiffusionPipeline
from sd_ort.checkpoints.schedulers import make_scheduler
from sd_ort.core.errors import InputError
from sd_ort.pipelines.request import IMAGE_ARGUMENTS, UNSUPPORTED_ARGUMENTS

PROMPT = "a red circle on a blue background"
SETTINGS: dict[str, Any] = {"num_inference_steps": 2, "guidance_scale": 4.0, "height": 64, "width": 64}
MIN_PSNR = 60.0  # dB, of fp32 pictures in 0..1; measured: above 90

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def reference(reference: Any) -> Any:
    """Return diffusers' pipeline with a scheduler that accepts any schedule."""
    reference.scheduler = diffusers.EulerDiscreteScheduler.from_config(reference.scheduler.config)
    return reference


@pytest.fixture(scope="module")
def pipeline(small_export: Path) -> StableDiffusionPipeline:
    result: StableDiffusionPipeline = StableDiffusionPipeline.from_pretrained(small_export, scheduler="euler")
    return result


@pytest.fixture(scope="module")
def plain(pipeline: Any) -> np.ndarray:
    return draw(pipeline)


def draw(pipeline: Any, **arguments: Any) -> np.ndarray:
    """Pictures (B, H, W, 3) in 0..1 of either pipeline."""
    generator = torch.Generator().manual_seed(7)
    call = {"generator": generator, "output_type": "np", **SETTINGS, **arguments}
    if "prompt_embeds" not in call:
        call = {"prompt": PROMPT, **call}
    return np.asarray(pipeline(**call)[0])


# --- Names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(UNSUPPORTED_ARGUMENTS))
def test_a_refused_name_is_answered_with_its_reason(pipeline: Any, name: str) -> None:
    with pytest.raises(InputError, match="is not taken") as refusal:
        draw(pipeline, **{name: 1})
    assert UNSUPPORTED_ARGUMENTS[name] in str(refusal.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"guidence_scale": 3}, "no argument of a pipeline: guidance_scale is"),
        ({"strength": 0.5}, IMAGE_ARGUMENTS["strength"]),
        ({"pag_scale": 1.0}, "use StableDiffusionPAGPipeline"),
        ({"prompt_embeds": torch.zeros(1, 77, 3)}, r"\[prompts, tokens, 64\]"),
        ({"negative_prompt_embeds": torch.zeros(1, 9, 64)}, "differ in shape"),
        ({"negative_prompt_embeds": torch.zeros(1, 77, 64), "negative_prompt": "x"}, "say the same"),
        ({"cross_attention_kwargs": {"gligen": 1}}, "'gligen' is unknown"),
        ({"callback_on_step_end_tensor_inputs": ["add_time_ids"]}, "reads no add_time_ids in this pipeline"),
        ({"callback_on_step_end": SDXLCFGCutoffCallback(0.4)}, "in this pipeline: it reads latents, prompt_embeds"),
        ({"timesteps": [900, 1], "sigmas": [3.0, 1.0]}, "give one of them"),
        ({"original_inference_steps": 40}, "EulerDiscreteScheduler takes no original_inference_steps"),
        ({"denoising_end": 1.5}, "no part of the schedule"),
        ({"control_guidance_start": 0.5, "image": Image.new("RGB", (64, 64))}, "no ControlNet"),
        ({"prompt": None}, "no prompt was given"),
        ({"prompt": 3}, "prompt must be a text or a list of texts or None, got '3'"),
        ({"eta": float("nan")}, "eta must be a finite number, got 'nan'"),
    ],
)
def test_arguments_that_do_not_fit(pipeline: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        draw(pipeline, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": 3}, "prompt must be a text or a list of texts or None, got '3'"),
        ({"num_inference_steps": 2.5}, "num_inference_steps must be an integer, got '2.5'"),
        ({"height": "64"}, "height must be an integer or None, got '64'"),
    ],
)
@pytest.mark.parametrize("class_", [sd_ort.FluxPipeline, sd_ort.ZImagePipeline])
def test_types_in_pipelines_of_transformers(class_: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        class_.__new__(class_)(**arguments)


# --- What they do ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [{"guidance_rescale": 0.7}, {"timesteps": [900, 300]}], ids=str)
def test_on_the_device(pipeline: Any, arguments: dict[str, Any]) -> None:
    looped = StableDiffusionPipeline.from_pipe(pipeline)
    looped.device_loop = True
    assert psnr(draw(looped, **arguments, progress=False), draw(pipeline, **arguments)) > 80
    assert looped.loop.buffer_cache


def test_results_unpack_as_in_diffusers(pipeline: Any) -> None:
    quick = {**SETTINGS, "num_inference_steps": 1, "output_type": "latent"}
    output = pipeline(PROMPT, **quick, generator=1)
    pair = pipeline(PROMPT, **quick, generator=1, return_dict=False)
    images, flags = output
    assert (type(pair), len(pair), flags) == (tuple, 2, None)
    for result in (output[0], output["images"], output.images, pair[0]):
        torch.testing.assert_close(result, images, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["array", "bytes", "tensor", "latents", "list"])
def test_image_formats(pipeline: Any, reference: Any, kind: str) -> None:
    pixels = np.asarray(parity_pairs.sample_image())
    unit = pixels.astype(np.float32) / 255
    tensor = torch.from_numpy(unit).permute(2, 0, 1)[None]
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    input_image, same = {
        "array": (unit, unit[None]),
        "bytes": (pixels, Image.fromarray(pixels)),
        "tensor": (tensor, tensor),
        "latents": (latents, latents),
        "list": ([Image.fromarray(pixels)], Image.fromarray(pixels)),
    }[kind]
    theirs = diffusers.StableDiffusionImg2ImgPipeline(**reference.components)
    theirs.set_progress_bar_config(disable=True)
    ours = StableDiffusionImg2ImgPipeline.from_pipe(pipeline)
    image = draw(ours, image=input_image, strength=0.7, height=None, width=None)
    settings = {name: value for name, value in SETTINGS.items() if name not in ("height", "width")}
    generator = torch.Generator().manual_seed(7)
    expected = theirs(PROMPT, image=same, strength=0.7, generator=generator, output_type="np", **settings).images
    assert psnr(image, expected) > MIN_PSNR


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


@pytest.mark.parametrize(
    ("class_", "method"), [(StableDiffusionPipeline, "_read_images"), (sd_ort.FluxPipeline, "_generate")]
)
def test_a_missing_package_is_reported_with_the_command_to_install_it(
    class_: Any, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ModuleNotFoundError("No module named 'diffusers'", name="diffusers")

    monkeypatch.setattr(class_, method, fail)
    monkeypatch.setattr(StableDiffusionPipeline, "_defaults", {})
    with pytest.raises(InputError, match=r"needs diffusers, which is not installed: pip install 'sd-ort\[export\]'"):
        class_.__new__(class_)("a")


def test_pipelines_of_transformers_have_the_methods_of_diffusers() -> None:
    pipeline: Any = sd_ort.FluxPipeline.__new__(sd_ort.FluxPipeline)
    pipeline.models = SimpleNamespace(device="cpu", provider="cpu")
    assert pipeline.to("cpu", silence_dtype_warnings=True) is pipeline
    with pytest.raises(InputError, match=r"runs on cpu: load it with .* for cuda"):
        pipeline.to("cuda:0")
    with pytest.raises(AttributeError, match="low_memory=True"):
        pipeline.enable_model_cpu_offload()
    with pytest.raises(AttributeError, match="IP-Adapters of diffusion transformers are not supported"):
        pipeline.load_ip_adapter("folder")
    assert pipeline.enable_attention_slicing() is None


@pytest.mark.parametrize("copy_of", [copy.deepcopy, pickle.dumps])
def test_a_copy_is_refused_with_what_to_do(pipeline: Any, copy_of: Any) -> None:
    with pytest.raises(TypeError, match="call from_pretrained again"):
        copy_of(pipeline)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("FlowMatchEulerDiscreteScheduler", "it has no scale_model_input"),
        ("ScoreSdeVeScheduler", "it has no step"),
        ("DDPMWuerstchenScheduler", "it has no order"),
        ("CogVideoXDPMScheduler", "its step needs timestep_back and sample"),
        ("RePaintScheduler", "its step needs original_image and mask"),
        ("KarrasVeScheduler", "its step needs sample_hat"),
    ],
)
def test_a_scheduler_of_other_models_is_refused(pipeline: Any, name: str, reason: str) -> None:
    swapped = StableDiffusionPipeline.from_pipe(pipeline)
    with pytest.raises(InputError, match=f"{name} cannot drive a U-Net, since {reason}: use euler, ddim"):
        swapped.scheduler = getattr(diffusers, name)()
    assert swapped.scheduler_name == pipeline.scheduler_name


def test_places_and_settings(small_export: Path, pipeline: Any) -> None:
    assert pipeline.to("cpu") is pipeline.to(torch.float32) is pipeline
    for argument, message in (("cuda", "provider="), (torch.float16, "--float16")):
        with pytest.raises(InputError, match=message):
            pipeline.to(argument)
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


def test_classes_with_pag(pipeline: Any) -> None:
    guided = sd_ort.AutoPipelineForText2Image.from_pipe(pipeline, enable_pag=True, pag_applied_layers="down.*")
    assert (type(guided), guided.pag_applied_layers) == (sd_ort.StableDiffusionPAGPipeline, ["down.*"])
    with pytest.raises(InputError, match="a string or a list of strings, got 3"):
        guided.set_pag_applied_layers(3)
    guided.set_pag_applied_layers("nowhere")
    with pytest.raises(InputError, match="no self-attention layer matches 'nowhere'"):
        draw(guided)
    with pytest.raises(AttributeError, match="XLPAGRefinerPipeline"):
        _ = sd_ort.StableDiffusionXLPAGRefinerPipeline
