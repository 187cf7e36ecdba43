"""Image to image, inpainting and ControlNet: on the device, several ControlNets, errors; tests/parity has the rest."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from cli_type import Cli
from image_metrics import psnr
from PIL import Image
from small_presets import export_with

from scripts.fixtures import parity_pairs
from sd_ort import StableDiffusionImg2ImgPipeline, StableDiffusionInpaintPipeline, StableDiffusionPipeline
from sd_ort.checkpoints.torch_pipeline import torch_pipeline
from sd_ort.core.errors import InputError
from sd_ort.core.image_file import read_image
from sd_ort.integrations.diffusers import OrtControlNet, accelerate
from sd_ort.pipelines.images import to_output_type

PROMPT = "a red circle on a blue background"
SETTINGS: dict[str, Any] = {"prompt": PROMPT, "num_inference_steps": 4, "guidance_scale": 4.0, "output_type": "np"}
MIN_PSNR = 60.0  # dB, of fp32 pictures in 0..1; measured: above 90


pytestmark = pytest.mark.usefixtures("one_thread")


def seeds(*values: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(value) for value in values]


@pytest.fixture(scope="module")
def input_image() -> Image.Image:
    return parity_pairs.sample_image()


@pytest.fixture(scope="module")
def mask() -> Image.Image:
    return parity_pairs.mask()


def as_kind(kind: str, reference: Any) -> Any:
    """The diffusers pipeline class `kind` with the models of another."""
    result = getattr(diffusers, kind)(**reference.components)
    result.set_progress_bar_config(disable=True)
    return result


def draw(pipeline: Any, **arguments: Any) -> np.ndarray:
    return np.asarray(pipeline(**{**SETTINGS, **arguments}).images)


# --- Image to image -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strength": 0.0}, "strength 0.0"),
        ({"strength": 0.1}, "leave none:"),
        ({"image": None}, "no image was given"),
        ({"height": 60}, "multiples of 8"),
    ],
)
def test_arguments_that_do_not_fit(
    small_export: Path, input_image: Image.Image, arguments: dict[str, Any], message: str
) -> None:
    ours = StableDiffusionImg2ImgPipeline.from_pretrained(small_export, low_memory=True)
    with pytest.raises(InputError, match=message):
        draw(ours, **{"image": input_image, **arguments})


def test_two_images_for_three_prompts(small_export: Path, input_image: Image.Image) -> None:
    ours = StableDiffusionImg2ImgPipeline.from_pretrained(small_export, low_memory=True)
    with pytest.raises(InputError, match="2 images were given for 3 images"):
        draw(ours, prompt=[PROMPT] * 3, image=[input_image] * 2)


# --- Inpainting -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inpaint_export(small_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_with(small_export, tmp_path_factory.mktemp("inpaint") / "raw", "sd15-inpaint-small", ["unet"])


def test_an_inpainting_unet_wants_a_mask(inpaint_export: Path) -> None:
    with pytest.raises(InputError, match="9 channels, for inpainting: give an image and a mask"):
        StableDiffusionPipeline.from_pretrained(inpaint_export)


# --- ControlNet -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def control_reference() -> Any:
    return torch_pipeline("sd15-controlnet-small", random_weights=True)


@pytest.fixture(scope="module")
def control_pipeline(controlled: Path) -> StableDiffusionPipeline:
    return StableDiffusionPipeline.from_pretrained(controlled)


@pytest.fixture(scope="module")
def accelerated(controlled: Path, control_reference: Any) -> Any:
    """diffusers with our sessions in the place of its models."""
    theirs = accelerate(as_kind("StableDiffusionControlNetPipeline", control_reference), controlled, provider="cpu")
    assert type(theirs.controlnet) is OrtControlNet
    return theirs


@pytest.mark.parametrize(
    "arguments",
    [
        {"controlnet_conditioning_scale": 0.7},
        {"guess_mode": True},
        {"control_guidance_start": 0.3, "control_guidance_end": 0.8},
    ],
    ids=["scale", "guess", "part"],
)
def test_controlnet_in_diffusers(
    accelerated: Any, control_reference: Any, input_image: Image.Image,
    arguments: dict[str, Any],
) -> None:  # fmt: skip
    arguments = {"height": 64, "width": 64, **arguments}
    expected = draw(control_reference, image=input_image, generator=seeds(3)[0], **arguments)
    assert psnr(draw(accelerated, image=input_image, generator=seeds(3)[0], **arguments), expected) > MIN_PSNR


def test_controlnet_without_its_image(control_pipeline: StableDiffusionPipeline, input_image: Image.Image) -> None:
    """A ControlNet wants one, and the input of image to image is none."""
    with pytest.raises(InputError, match="give a control_image"):
        draw(control_pipeline, height=64, width=64)
    size = {"height": 64, "width": 64}
    shown = draw(control_pipeline, control_image=input_image, generator=3, controlnet_conditioning_scale=0.7, **size)
    assert psnr(draw(control_pipeline, image=input_image, generator=3, **size), shown) < 50, "without effect"


def test_controlnet_of_another_scale(controlled: Path, tmp_path: Path, input_image: Image.Image) -> None:
    shutil.copytree(controlled, tmp_path / "other")
    config = tmp_path / "other" / "controlnet" / "config.json"
    entries = json.loads(config.read_text())
    entries["conditioning_embedding_out_channels"].pop()
    config.write_text(json.dumps(entries))
    ours = StableDiffusionPipeline.from_pretrained(tmp_path / "other")
    with pytest.raises(InputError, match="halves its image 2 times and the VAE 3 times: use a ControlNet of this"):
        draw(ours, control_image=input_image)


@pytest.mark.parametrize("guess", [False, True])
def test_several_controlnets(controlled: Path, control_reference: Any, input_image: Image.Image, guess: bool) -> None:
    """Each with its image, scale and part of the schedule; their residuals add up."""
    pictures = [input_image, input_image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)]
    arguments: dict[str, Any] = {"height": 64, "width": 64, "guess_mode": guess}
    arguments |= {"controlnet_conditioning_scale": [0.7, 0.4], "control_guidance_end": [1.0, 0.6]}
    parts = {**control_reference.components, "controlnet": [control_reference.controlnet] * 2}
    theirs = diffusers.StableDiffusionControlNetPipeline(**parts)
    theirs.set_progress_bar_config(disable=True)
    expected = draw(theirs, image=pictures, generator=seeds(3)[0], **arguments)
    ours = StableDiffusionPipeline.from_pretrained(controlled, controlnet=[controlled, controlled])
    assert psnr(draw(ours, control_image=pictures, generator=3, **arguments), expected) > MIN_PSNR
    with pytest.raises(InputError, match="1 control images for 2 ControlNets"):
        draw(ours, control_image=[input_image], height=64, width=64)

    two = {"prompt": ["a cat", "a dog"], "height": 64, "width": 64}
    nested = [pictures, pictures[::-1]]  # one list per prompt
    seen: list[Any] = []

    def change(pipe: Any, index: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        seen.append([tuple(image.shape) for image in tensors["image"]])
        return {"image": [image.flip(-1) for image in tensors["image"]]}

    tensors = {"callback_on_step_end": change, "callback_on_step_end_tensor_inputs": ["latents", "image"]}
    expected = draw(theirs, image=nested, generator=seeds(3)[0], **two, **tensors)
    assert psnr(draw(ours, control_image=nested, generator=3, **two, **tensors), expected) > MIN_PSNR
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]
    assert len(seen[0]) == 2
    tensors["callback_on_step_end"] = lambda pipe, index, timestep, tensors: {"image": tensors["image"][0]}
    with pytest.raises(InputError, match="1 control images for 2 ControlNets"):
        draw(ours, control_image=nested, **two, **tensors)
    with pytest.raises(InputError, match="one list per prompt, of 2 images each"):
        draw(ours, control_image=[[input_image], [input_image]], **two)


@pytest.mark.parametrize("count", [1, 2])
def test_controlnets_on_the_device(controlled: Path, input_image: Image.Image, count: int) -> None:
    """One hands its residuals on, those of several are added up; waited for or not, the same bytes."""
    images = {}
    arguments = {"height": 64, "width": 64, "control_guidance_end": 0.6, "controlnet_conditioning_scale": 0.7}
    shown = input_image if count == 1 else [input_image, input_image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)]
    for looped, waits in ((False, [False]), (True, [False, True])):
        ours = StableDiffusionPipeline.from_pretrained(controlled, controlnet=[controlled] * count, device_loop=looped)
        for wait in waits:
            ours.loop.wait = wait
            for seed in (1, 3):  # the second one reuses the buffers of the first
                images[looped, wait] = draw(ours, control_image=shown, generator=seed, progress=False, **arguments)
        assert bool(ours.loop.buffer_cache) == looped
    assert psnr(images[True, False], images[False, False]) > 80
    np.testing.assert_array_equal(images[True, False], images[True, True])
    if count == 1:  # each side of a split guidance has the ControlNet, and its image
        ours = StableDiffusionPipeline.from_pretrained(controlled, controlnet=[controlled], split_guidance=(0, 1))
        split = draw(ours, control_image=shown, generator=3, progress=False, **arguments)
        np.testing.assert_array_equal(split, images[True, True])


def test_control_image_without_a_controlnet(small_export: Path, input_image: Image.Image) -> None:
    with pytest.raises(InputError, match="no ControlNet for the control image"):
        draw(StableDiffusionPipeline.from_pretrained(small_export), control_image=input_image, height=64, width=64)


# --- The command ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def both_loops(small_export: Path) -> dict[bool, StableDiffusionImg2ImgPipeline]:
    """A pipeline whose loop is on the host (False), and one with the loop on the device (True)."""
    open_ = StableDiffusionImg2ImgPipeline.from_pretrained
    return {looped: open_(small_export, device_loop=looped) for looped in (False, True)}


@pytest.mark.parametrize("scheduler", ["euler", "pndm", "dpmsolver"])
def test_on_the_device(
    both_loops: dict[bool, Any], input_image: Image.Image, mask: Image.Image, scheduler: str
) -> None:
    """Image to image, and inpainting whose mask keeps a part, in the loop on the device as on the host."""
    tasks = ((StableDiffusionImg2ImgPipeline, {}), (StableDiffusionInpaintPipeline, {"mask_image": mask}))
    for cls, more in tasks:
        pictures = []
        for looped in (False, True):
            pipeline = cls.from_pipe(both_loops[looped], scheduler=scheduler)
            arguments = {**SETTINGS, "image": input_image, "strength": 0.8, "progress": False, **more}
            pictures.append(pipeline(**arguments, generator=1).images)
            assert bool(pipeline.loop.buffer_cache) == looped
        assert psnr(pictures[1], pictures[0]) > 80


def test_inpainting_unet_on_the_device(inpaint_export: Path, input_image: Image.Image, mask: Image.Image) -> None:
    """A UNet of nine channels reads mask and image behind the latents."""
    pictures = []
    for looped in (False, True):
        pipeline = StableDiffusionInpaintPipeline.from_pretrained(inpaint_export, device_loop=looped)
        pictures.append(pipeline(**SETTINGS, image=input_image, mask_image=mask, generator=1, progress=False).images)
        assert bool(pipeline.loop.buffer_cache) == looped
    assert psnr(pictures[1], pictures[0]) > 80


def test_generate_from_an_image(
    sd_ort: Cli, small_export: Path, tmp_path: Path, input_image: Image.Image, mask: Any
) -> None:
    input_image.save(tmp_path / "in.png")
    mask.save(tmp_path / "mask.png")
    common = ("generate", PROMPT, "--model", small_export, "--steps", 2, "--seed", 1, "--image", tmp_path / "in.png")
    out = tmp_path / "out.png"
    code, _, error = sd_ort(*common, "--mask", tmp_path / "mask.png", "--low-memory", "--out", out)
    assert (code, np.asarray(Image.open(out)).shape) == (0, (128, 128, 3)), error  # the model's, as in diffusers
    for side, size in ((130, (128, 192)), (100, (96, 96))):  # down to whole latents
        input_image.resize((196 if side == 130 else side, side)).save(tmp_path / "odd.png")
        code, _, error = sd_ort(*common[:-1], tmp_path / "odd.png", "--overwrite", "--out", out)
        assert (code, np.asarray(Image.open(out)).shape) == (0, (*size, 3)), error
    code, _, error = sd_ort(*common[:-2], "--strength", 0.5)
    assert (code, "pass it with --image" in error) == (2, True)
    (tmp_path / "text.png").write_text("no image")
    input_image.resize((40, 7)).save(tmp_path / "small.png")
    for name, message in (
        ("text", "text.png cannot be read as an image (it is none of PNG,"),
        ("small", "the image has 40 x 7 pixels, less than one latent of 8 x 8."),
    ):
        code, _, error = sd_ort(*common[:-1], tmp_path / f"{name}.png")
        assert (code, message in error) == (2, True), error


def test_image_files_as_an_editor_writes_them(tmp_path: Path, input_image: Image.Image) -> None:
    """16 bits keep their upper 8 instead of being clipped to white; a camera's EXIF turns the image."""
    grey = np.asarray(input_image.convert("L"))
    for name, pixels in (("wide.png", grey.astype(np.uint16) * 257), ("wide.tiff", grey.astype(np.uint16) * 256 + 9)):
        Image.fromarray(pixels).save(tmp_path / name)
        assert (np.asarray(read_image(tmp_path / name)) == grey[:, :, None]).all()
    exif = Image.Exif()
    exif[0x0112] = 6  # Orientation: the camera was turned, so the image is to be turned clockwise
    landscape = input_image.resize((64, 32))
    landscape.save(tmp_path / "turned.png", exif=exif)
    turned = landscape.transpose(Image.Transpose.ROTATE_270)
    assert read_image(tmp_path / "turned.png").tobytes() == turned.tobytes()
    for pixels in (grey.astype(np.int32), grey.astype(np.float32)):
        Image.fromarray(pixels).save(tmp_path / "range.tiff")
        with pytest.raises(InputError, match="32 bits, not 8 or 16"):
            read_image(tmp_path / "range.tiff")


@pytest.mark.parametrize("shape", [(1, 3, 512, 512), (3, 3, 37, 19)])
@pytest.mark.parametrize("output_type", ["np", "pt", "uint8", "pil"])
def test_pixels_become_images(shape, output_type):
    """The steps of diffusers' VaeImageProcessor, also for ties of rounding and for pixels outside of -1..1."""
    rng = np.random.default_rng(0)
    halves = ((rng.integers(-10, 270, shape) + 0.5) / 127.5 - 1).astype(np.float32)
    pixels = np.where(rng.random(shape) < 0.5, halves, rng.normal(0, 1.2, shape).astype(np.float32))
    unit = (torch.from_numpy(pixels) * 0.5 + 0.5).clamp(0, 1)
    rows = unit.permute(0, 2, 3, 1).numpy()
    expected = {"pt": unit.numpy(), "np": rows}.get(output_type, (rows * 255).round().astype(np.uint8))
    for layout in (pixels, np.asfortranarray(pixels)):
        images = to_output_type(layout, output_type)
        assert np.array_equal(np.stack([np.asarray(image) for image in images]), expected)
