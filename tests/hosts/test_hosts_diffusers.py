"""diffusers' pipelines on a folder's components draw what they draw on torch's, from the same seeds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from sd_ort import StableDiffusionPipeline
from sd_ort.benchmark.engines.pytorch import torch_pipeline
from sd_ort.core.errors import InputError
from sd_ort.hosts.diffusers import OrtTextEncoder, OrtUNet, OrtVae, accelerate, install, uninstall
from sd_ort.hosts.models import HostModels
from sd_ort.hosts.tensors import TensorModel
from sd_ort.hosts.unet import HostUNet
from sd_ort.optimize.optimizer import optimize
from sd_ort.runtime.captured import GraphModel

SETTINGS: dict[str, Any] = {
    "prompt": "a red circle on a blue background", "num_inference_steps": 3, "guidance_scale": 4.0, "height": 64,
    "width": 64, "output_type": "np",
}  # fmt: skip
MIN_PSNR = 80.0  # dB, of fp32 pictures in 0..1; measured: above 110


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def reference() -> Any:
    return torch_pipeline("sd15-small", random_weights=True, seed=0)


@pytest.fixture(scope="module")
def hoisted(small_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The UNet hoisted and fused, the other components as they were exported."""
    out = tmp_path_factory.mktemp("hosts") / "hoisted"
    optimize(small_export, out, components=["unet"], hoisted=True)
    for name in ("text_encoder", "vae_encoder", "vae_decoder"):
        shutil.copytree(small_export / name, out / name)
    return out


def torchs(kind: str, reference: Any) -> Any:
    made = getattr(diffusers, kind)(**reference.components, requires_safety_checker=False)
    made.set_progress_bar_config(disable=True)
    return made


def draw(pipeline: Any, seed: int = 3, **arguments: Any) -> Any:
    return pipeline(**{**SETTINGS, **arguments}, generator=torch.Generator().manual_seed(seed)).images


def assert_same(drawn: Any, expected: Any) -> None:
    assert expected.std() > 0.05, "a flat picture proves nothing"
    assert -10 * np.log10(np.mean((drawn - expected) ** 2) + 1e-20) > MIN_PSNR


def picture() -> Image.Image:
    y, x = np.mgrid[:64, :64]
    return Image.fromarray(np.stack([4 * x, 4 * y, 255 - 2 * (x + y)], -1).astype(np.uint8))


def mask() -> Image.Image:
    pixels = np.zeros((64, 64), np.uint8)
    pixels[8:40, 16:56] = 255
    return Image.fromarray(pixels)


# --- The same pictures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("StableDiffusionPipeline", {"negative_prompt": "blurry", "num_images_per_prompt": 2}),
        ("StableDiffusionImg2ImgPipeline", {"image": picture(), "strength": 0.7, "height": None, "width": None}),
        ("StableDiffusionInpaintPipeline", {"image": picture(), "mask_image": mask(), "strength": 0.9}),
    ],
    ids=["text", "image", "inpainting"],
)
def test_same_pictures(reference: Any, hoisted: Path, kind: str, arguments: dict[str, Any]) -> None:
    arguments = {name: value for name, value in {**SETTINGS, **arguments}.items() if value is not None}
    seed = torch.Generator().manual_seed
    expected = torchs(kind, reference)(**arguments, generator=seed(3)).images
    pipe = accelerate(torchs(kind, reference), hoisted, provider="cpu")
    assert [type(pipe.unet), type(pipe.vae), type(pipe.text_encoder)] == [OrtUNet, OrtVae, OrtTextEncoder]
    assert not list(pipe.unet.parameters())
    assert_same(pipe(**arguments, generator=seed(3)).images, expected)


def test_latents_enlarged_and_drawn_over(reference: Any, small_export: Path) -> None:
    """Latent upscaling: text to latents, interpolated, and image to image from there; the VAE in tiles."""
    drawn = []
    for accelerated in (False, True):
        pipe, larger = torchs("StableDiffusionPipeline", reference), torchs("StableDiffusionImg2ImgPipeline", reference)
        if accelerated:
            accelerate(pipe, small_export, provider="cpu")
            larger = diffusers.StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)
        small = draw(pipe, output_type="latent")
        latents = torch.nn.functional.interpolate(small, scale_factor=2, mode="nearest")
        larger.vae.enable_tiling()
        larger.vae.tile_latent_min_size, larger.vae.tile_sample_min_size = 8, 64
        monkeyed = {"image": latents, "strength": 0.6, "prompt": SETTINGS["prompt"], "num_inference_steps": 3}
        drawn.append(larger(**monkeyed, generator=torch.Generator().manual_seed(1), output_type="np").images)
        larger.vae.disable_tiling()
    assert drawn[0].shape == (1, 128, 128, 3)
    assert_same(drawn[1], drawn[0])


def test_callbacks_see_and_change_latents(reference: Any, small_export: Path) -> None:
    seen: list[Any] = []

    def halve(pipe: Any, step: int, timestep: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        seen.append((step, int(timestep), sorted(tensors)))
        return {"latents": tensors["latents"] * 0.5}

    expected = draw(torchs("StableDiffusionPipeline", reference), callback_on_step_end=halve)
    pipe = accelerate(torchs("StableDiffusionPipeline", reference), small_export, provider="cpu")
    assert_same(draw(pipe, callback_on_step_end=halve), expected)
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]


def test_folder_that_names_our_classes(reference: Any, hoisted: Path, tmp_path: Path) -> None:
    """`DiffusionPipeline.from_pretrained` opens it, our own pipeline still does, and nothing of it is left behind."""
    folder = tmp_path / "folder"
    shutil.copytree(hoisted, folder)
    before = json.loads((folder / "model_index.json").read_text())
    assert install(folder) == install(folder) == ["unet", "vae", "text_encoder"]
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder)
    assert isinstance(pipe, diffusers.StableDiffusionPipeline)
    assert isinstance(pipe.vae, OrtVae)
    assert_same(draw(pipe), draw(torchs("StableDiffusionPipeline", reference)))
    assert isinstance(StableDiffusionPipeline.from_pretrained(folder), StableDiffusionPipeline)
    with pytest.raises(InputError, match=r"optimized for torch\.float32"):
        diffusers.DiffusionPipeline.from_pretrained(folder, dtype=torch.float16)
    uninstall(folder)
    assert json.loads((folder / "model_index.json").read_text()) == before
    with pytest.raises(InputError, match="nothing to uninstall"):
        uninstall(folder)


def test_loras_without_peft(reference: Any, hoisted: Path) -> None:
    """Loaded, weighed and taken off through the pipeline, as our own pipeline does it."""
    generator = torch.Generator().manual_seed(0)
    name, width = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k", 32
    out, into = reference.unet.down_blocks[0].attentions[0].transformer_blocks[0].attn2.to_k.weight.shape
    assert out == width
    lora = {
        f"{name}.lora_A.weight": torch.randn(4, into, generator=generator),
        f"{name}.lora_B.weight": torch.randn(out, 4, generator=generator),
    }
    pipe = accelerate(torchs("StableDiffusionPipeline", reference), hoisted, provider="cpu")
    ours = StableDiffusionPipeline.from_pretrained(hoisted)
    plain = draw(pipe)
    for each in (pipe, ours):
        each.load_lora_weights(lora, adapter_name="one")
        each.set_adapters("one", 2.0)
    drawn = draw(pipe)
    assert np.abs(drawn - plain).max() > 1e-3
    assert_same(drawn, draw(ours, progress=False))
    pipe.unload_lora_weights()
    assert np.array_equal(draw(pipe), plain)


# --- What is refused ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pipe(reference: Any, small_export: Path) -> Any:
    return accelerate(torchs("StableDiffusionPipeline", reference), small_export, provider="cpu")


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
def test_calls_that_the_graph_cannot_answer(pipe: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        draw(pipe, **arguments)


def test_unet_alone(pipe: Any) -> None:
    x, context = torch.zeros(2, 4, 8, 8), torch.zeros(2, 77, pipe.unet.config.cross_attention_dim)
    half = pipe.unet(x.to(torch.bfloat16), 7, context).sample
    assert half.dtype == torch.bfloat16
    assert torch.allclose(half.float(), pipe.unet(x, torch.tensor([7, 7]), context, return_dict=False)[0], atol=0.05)
    with pytest.raises(InputError, match="different timesteps"):
        pipe.unet(x, torch.tensor([7, 8]), context)
    with pytest.raises(InputError, match="takes no ControlNet"):
        pipe.unet(x, 7, context, mid_block_additional_residual=x)


def test_folder_of_another_model(reference: Any, small_export: Path, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(small_export, folder, symlinks=True)
    path = folder / "unet" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"cross_attention_dim": 48}))
    theirs = torchs("StableDiffusionPipeline", reference)
    with pytest.raises(InputError, match="holds another model: its unet has cross_attention_dim 48"):
        accelerate(theirs, folder, provider="cpu")
    assert not isinstance(theirs.unet, OrtUNet), "all are swapped, or none"
    with pytest.raises(InputError, match="has no UNet"):
        accelerate(object(), folder)


# --- torch's memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("captured", [False, True])
def test_bound_where_they_lie(small_export: Path, captured: bool) -> None:
    """What a GPU's tensors go through, on the CPU: outputs are the caller's own, a graph's buffers are not."""
    models = HostModels(small_export, "cpu")
    session = models.models["unet"].session
    model = TensorModel(GraphModel(session, "cpu") if captured else models.models["unet"], torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    width = models.unet_config["cross_attention_dim"]
    made = []
    for rows in (1, 2, 1):
        feed = {
            "sample": torch.randn(rows, 4, 8, 8, generator=generator, dtype=torch.float64),
            "timestep": torch.full((1,), 7),
            "encoder_hidden_states": torch.randn(rows, width, 77, generator=generator).transpose(1, 2),
        }
        (out,) = model(feed).values()
        (expected,) = models.run("unet", **feed).values()
        made.append((out, out.clone()))
        assert torch.allclose(out, expected, atol=1e-5)
    assert all(torch.equal(out, then) for out, then in made)
    assert len(model.captured) == (2 if captured else 0)


def test_graph_reads_what_is_lent(hoisted: Path) -> None:
    """On the CPU's memory: prompts and timesteps change in the tensors that the captured UNet reads, without a copy."""
    plain, models = HostModels(hoisted, "cpu"), HostModels(hoisted, "cpu")
    models.shared = True
    models.models["unet"] = GraphModel(models.models["unet"].session, "cpu")
    ours, expected = HostUNet(models), HostUNet(plain)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randn(2, 77, models.unet_config["cross_attention_dim"], generator=generator) for _ in range(2)]
    for number, inference in ((0, True), (0, False), (1, True), (0, False)):
        told, timestep = {"encoder_hidden_states": prompts[number]}, float(torch.randint(999, (), generator=generator))
        sample = torch.randn(2, 4, 8, 8, generator=generator)
        with torch.inference_mode(inference):
            drawn = ours(sample, timestep, told, key=number)
        assert torch.allclose(drawn, expected(sample, timestep, told), atol=1e-5)
    (graph,) = models.on_device["unet"].captured.values()
    lent = {}
    for part in ("unet_prompt", "unet_time"):
        lent |= next(iter(models.on_device[part].lends.values()))
    assert {n for n, tensor in graph.inputs.items() if tensor is lent.get(n)} == graph.inputs.keys() - {"sample"}
