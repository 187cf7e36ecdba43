"""diffusers' pipelines with a folder's components generate the images of torch's models, from the same seeds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from scripts.fixtures.parity_pairs import mask, sample_image
from sd_ort import StableDiffusionPipeline
from sd_ort.core.errors import InputError
from sd_ort.integrations.diffusers import OrtTextEncoder, OrtUNet, OrtVae, accelerate, install, uninstall
from sd_ort.integrations.models import TorchComponentSessions
from sd_ort.integrations.tensors import TorchOrtModel
from sd_ort.integrations.unet import UNetRunner
from sd_ort.runtime.bound_run import GpuGraphModel
from sd_ort.stages import optimize

SETTINGS: dict[str, Any] = {
    "prompt": "a red circle on a blue background", "num_inference_steps": 3, "guidance_scale": 4.0, "height": 64,
    "width": 64, "output_type": "np",
}  # fmt: skip
SIZES: list[dict[str, int]] = [{}, {"height": 72, "width": 88}, {}]
MIN_PSNR = 80.0  # dB, of float32 images in 0..1; measured: above 110


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def hoisted(small_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a hoisted and fused UNet and the exported other components."""
    out = tmp_path_factory.mktemp("hosts") / "hoisted"
    optimize(small_export, out, components=["unet"], hoist=True)
    for name in ("text_encoder", "vae_encoder", "vae_decoder"):
        shutil.copytree(small_export / name, out / name)
    return out


def torch_pipeline_of(name: str, reference: Any) -> Any:
    pipeline = getattr(diffusers, name)(**reference.components, requires_safety_checker=False)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def generate(pipeline: Any, seed: int = 3, **arguments: Any) -> Any:
    return pipeline(**{**SETTINGS, **arguments}, generator=torch.Generator().manual_seed(seed)).images


def assert_same(image: Any, expected: Any) -> None:
    assert expected.std() > 0.05, "the image is flat"
    assert -10 * np.log10(np.mean((image - expected) ** 2) + 1e-20) > MIN_PSNR


# --- Equal images ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("StableDiffusionPipeline", {"negative_prompt": "blurry", "num_images_per_prompt": 2}),
        ("StableDiffusionImg2ImgPipeline", {"image": sample_image(), "strength": 0.7, "height": None, "width": None}),
        ("StableDiffusionInpaintPipeline", {"image": sample_image(), "mask_image": mask(), "strength": 0.9}),
    ],
    ids=["text", "image", "inpainting"],
)
def test_equal_images(reference: Any, hoisted: Path, kind: str, arguments: dict[str, Any]) -> None:
    arguments = {name: value for name, value in {**SETTINGS, **arguments}.items() if value is not None}
    seed = torch.Generator().manual_seed
    expected = torch_pipeline_of(kind, reference)(**arguments, generator=seed(3)).images
    pipe = accelerate(torch_pipeline_of(kind, reference), hoisted, provider="cpu")
    assert [type(pipe.unet), type(pipe.vae), type(pipe.text_encoder)] == [OrtUNet, OrtVae, OrtTextEncoder]
    assert not list(pipe.unet.parameters())
    assert_same(pipe(**arguments, generator=seed(3)).images, expected)


def test_sizes_that_do_not_halve_evenly(reference: Any, small_export: Path, hoisted: Path) -> None:
    """Odd latents between calls of the even size: the graph of the torch UNet's `upsample_size`."""
    expected = [generate(torch_pipeline_of("StableDiffusionPipeline", reference), **size) for size in SIZES]
    for folder in (small_export, hoisted):
        pipe = accelerate(torch_pipeline_of("StableDiffusionPipeline", reference), folder, provider="cpu")
        for size, image in zip(SIZES, expected, strict=True):
            assert_same(generate(pipe, **size), image)


def test_latent_upscaling(reference: Any, small_export: Path) -> None:
    """Text to latents, interpolation, and image to image from the result; the VAE in tiles."""
    images = []
    for accelerated in (False, True):
        pipe, larger = (
            torch_pipeline_of("StableDiffusionPipeline", reference),
            torch_pipeline_of("StableDiffusionImg2ImgPipeline", reference),
        )
        if accelerated:
            accelerate(pipe, small_export, provider="cpu")
            larger = diffusers.StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)
        small = generate(pipe, output_type="latent")
        latents = torch.nn.functional.interpolate(small, scale_factor=2, mode="nearest")
        larger.vae.enable_tiling()
        larger.vae.tile_latent_min_size, larger.vae.tile_sample_min_size = 8, 64
        arguments = {"image": latents, "strength": 0.6, "prompt": SETTINGS["prompt"], "num_inference_steps": 3}
        images.append(larger(**arguments, generator=torch.Generator().manual_seed(1), output_type="np").images)
        larger.vae.disable_tiling()
    assert images[0].shape == (1, 128, 128, 3)
    assert_same(images[1], images[0])


def test_callbacks_see_and_change_latents(reference: Any, small_export: Path) -> None:
    seen: list[Any] = []

    def halve(pipe: Any, step: int, timestep: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        seen.append((step, int(timestep), sorted(tensors)))
        return {"latents": tensors["latents"] * 0.5}

    expected = generate(torch_pipeline_of("StableDiffusionPipeline", reference), callback_on_step_end=halve)
    pipe = accelerate(torch_pipeline_of("StableDiffusionPipeline", reference), small_export, provider="cpu")
    assert_same(generate(pipe, callback_on_step_end=halve), expected)
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]


def test_install_into_model_index(reference: Any, hoisted: Path, tmp_path: Path) -> None:
    """diffusers and sd-ort open the folder after `install`; `uninstall` restores model_index.json."""
    folder = tmp_path / "folder"
    shutil.copytree(hoisted, folder)
    before = json.loads((folder / "model_index.json").read_text())
    assert install(folder) == install(folder) == ["unet", "vae", "text_encoder"]
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder)
    assert isinstance(pipe, diffusers.StableDiffusionPipeline)
    assert isinstance(pipe.vae, OrtVae)
    assert_same(generate(pipe), generate(torch_pipeline_of("StableDiffusionPipeline", reference)))
    assert isinstance(StableDiffusionPipeline.from_pretrained(folder), StableDiffusionPipeline)
    with pytest.raises(InputError, match=r"optimized for torch\.float32"):
        diffusers.DiffusionPipeline.from_pretrained(folder, dtype=torch.float16)
    uninstall(folder)
    assert json.loads((folder / "model_index.json").read_text()) == before
    with pytest.raises(InputError, match="nothing to uninstall"):
        uninstall(folder)


def test_loras_without_peft(reference: Any, hoisted: Path) -> None:
    """Loading, scaling and unloading a LoRA give the images of sd-ort's pipeline."""
    generator = torch.Generator().manual_seed(0)
    name, width = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k", 32
    out, into = reference.unet.down_blocks[0].attentions[0].transformer_blocks[0].attn2.to_k.weight.shape
    assert out == width
    lora = {
        f"{name}.lora_A.weight": torch.randn(4, into, generator=generator),
        f"{name}.lora_B.weight": torch.randn(out, 4, generator=generator),
    }
    pipe = accelerate(torch_pipeline_of("StableDiffusionPipeline", reference), hoisted, provider="cpu")
    ours = StableDiffusionPipeline.from_pretrained(hoisted)
    without_lora = generate(pipe)
    for each in (pipe, ours):
        each.load_lora_weights(lora, adapter_name="one")
        each.set_adapters("one", 2.0)
    with_lora = generate(pipe)
    assert np.abs(with_lora - without_lora).max() > 1e-3
    assert_same(with_lora, generate(ours, progress=False))
    pipe.unload_lora_weights()
    assert np.array_equal(generate(pipe), without_lora)


# --- Unsupported calls ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pipe(reference: Any, small_export: Path) -> Any:
    return accelerate(torch_pipeline_of("StableDiffusionPipeline", reference), small_export, provider="cpu")


def test_moves(pipe: Any, tmp_path: Path) -> None:
    assert pipe.to("cpu") is pipe
    assert pipe.to(torch.float32) is pipe
    assert (pipe.device.type, pipe.dtype, pipe.unet.dtype) == ("cpu", torch.float32, torch.float32)
    for move, message in (
        (lambda: pipe.to("cuda"), "runs on the cpu provider"),
        (lambda: pipe.to(torch.float16), "optimize its folder again .with --float16"),
        (lambda: pipe.enable_model_cpu_offload(device="cuda"), "are not moved between GPU and CPU"),
        (lambda: pipe.enable_sequential_cpu_offload(device="cuda"), "are not moved between GPU and CPU"),
        (lambda: pipe.save_pretrained(tmp_path), "copy the folder"),
        (lambda: pipe.unet.set_attn_processor(None), "attention is fused"),
        (lambda: pipe.enable_freeu(1, 1, 1, 1), "FreeU"),
    ):
        with pytest.raises(InputError, match=message):
            move()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clip_skip": 1}, "clip_skip"),
        ({"cross_attention_kwargs": {"scale": 0.5}}, "without cross_attention_kwargs"),
        ({"ip_adapter_image_embeds": [torch.zeros(2, 1, 4)]}, "image_embeds"),
    ],
    ids=["clip_skip", "attention", "adapter"],
)
def test_unsupported_arguments(pipe: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        generate(pipe, **arguments)


def test_unet_alone(pipe: Any) -> None:
    x, context = torch.zeros(2, 4, 8, 8), torch.zeros(2, 77, pipe.unet.config.cross_attention_dim)
    half = pipe.unet(x.to(torch.bfloat16), 7, context).sample
    assert half.dtype == torch.bfloat16
    assert torch.allclose(half.float(), pipe.unet(x, torch.tensor([7, 7]), context, return_dict=False)[0], atol=0.05)
    with pytest.raises(InputError, match="different timesteps"):
        pipe.unet(x, torch.tensor([7, 8]), context)
    with pytest.raises(InputError, match="takes no ControlNet"):
        pipe.unet(x, 7, context, mid_block_additional_residual=x)


def test_a_folder_that_was_removed(reference: Any, small_export: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(small_export, tmp_path / "removed")
    pipe = accelerate(torch_pipeline_of("StableDiffusionPipeline", reference), folder, provider="cpu")
    shutil.rmtree(folder)
    with pytest.raises(InputError, match=r"removed/text_encoder/model\.onnx is gone: make the folder again"):
        generate(pipe)
    with pytest.raises(InputError, match="removed is gone: make the folder again"):
        pipe.load_lora_weights({})


def test_folder_of_another_model(reference: Any, small_export: Path, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(small_export, folder, symlinks=True)
    path = folder / "unet" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"cross_attention_dim": 48}))
    pipeline = torch_pipeline_of("StableDiffusionPipeline", reference)
    with pytest.raises(InputError, match="holds another model: its unet has cross_attention_dim 48"):
        accelerate(pipeline, folder, provider="cpu")
    assert not isinstance(pipeline.unet, OrtUNet), "all models are replaced, or none"
    with pytest.raises(InputError, match="has no UNet"):
        accelerate(object(), folder)


# --- torch's memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("captured", [False, True])
def test_io_binding(small_export: Path, captured: bool) -> None:
    """The code path of GPU tensors, on the CPU: later runs do not overwrite the returned outputs."""
    models = TorchComponentSessions(small_export, "cpu")
    session = models.models["unet"].session
    model = TorchOrtModel(GpuGraphModel(session, "cpu") if captured else models.models["unet"], torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    width = models.unet_config["cross_attention_dim"]
    outputs = []
    for rows in (1, 2, 1):
        feed = {
            "sample": torch.randn(rows, 4, 8, 8, generator=generator, dtype=torch.float64),
            "timestep": torch.full((1,), 7),
            "encoder_hidden_states": torch.randn(rows, width, 77, generator=generator).transpose(1, 2),
        }
        (out,) = model(feed).values()
        (expected,) = models.run("unet", **feed).values()
        outputs.append((out, out.clone()))
        assert torch.allclose(out, expected, atol=1e-5)
    assert all(torch.equal(out, copy) for out, copy in outputs)
    assert len(model.captured_runs) == (2 if captured else 0)


def test_zero_copy_inputs(hoisted: Path) -> None:
    """On the CPU: the captured UNet reads the reused output tensors of the prompt and time graphs without a copy."""
    uncaptured, models = TorchComponentSessions(hoisted, "cpu"), TorchComponentSessions(hoisted, "cpu")
    models.shared = True
    models.models["unet"] = GpuGraphModel(models.models["unet"].session, "cpu")
    captured_unet, expected = UNetRunner(models), UNetRunner(uncaptured)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randn(2, 77, models.unet_config["cross_attention_dim"], generator=generator) for _ in range(2)]
    for index, inference in ((0, True), (0, False), (1, True), (0, False)):
        conditioning = {"encoder_hidden_states": prompts[index]}
        timestep = float(torch.randint(999, (), generator=generator))
        sample = torch.randn(2, 4, 8, 8, generator=generator)
        with torch.inference_mode(inference):
            prediction = captured_unet(sample, timestep, conditioning, key=index)
        assert torch.allclose(prediction, expected(sample, timestep, conditioning), atol=1e-5)
    (run,) = models.torch_models["unet"].captured_runs.values()
    reused = {}
    for part in ("unet_prompt", "unet_time"):
        reused |= next(iter(models.torch_models[part].reusable_outputs.values()))
    assert {n for n, tensor in run.inputs.items() if tensor is reused.get(n)} == run.inputs.keys() - {"sample"}
