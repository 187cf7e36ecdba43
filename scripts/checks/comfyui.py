"""Our nodes in the real ComfyUI, headless: its own executor runs the example workflows, the pictures are compared.

    python scripts/checks/comfyui.py --comfyui CHECKOUT [--out results/hosts/comfyui.json]

CHECKOUT is ComfyUI's source, 0.33.0 or later, of which nothing is changed: models, nodes and pictures lie in a
temporary folder. Its requirements must be installed beside sd-ort (einops, torchsde, comfy-aimdo, comfy-kitchen,
aiohttp, av, ...; torchvision and torchaudio may be missing, they are stubbed). The demo model is optimized for the
CPU, with a ControlNet and two LoRAs with random weights, and every workflow of sd_ort/integrations/comfyui/workflows
is run; text to image also on a small SDXL of random weights, on the demo model's checkpoint, which our node converts,
and decoded in tiles. All but the tiles and the latent upscaling must draw what our own pipelines draw from the same
noise (PSNR of the 8-bit pictures at least 40 dB). Inpainting is held against the same steps with the latents outside
its mask put back exactly: pixels there are no measure, since the VAE decodes all of an image at once. A latent is
enlarged and inpainted.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import diffusers
import numpy as np
import torch
from PIL import Image

from scripts.checks.comfyui_expected import MODEL, SIDE, ours, ours_from_picture, ours_inpainted, psnr
from scripts.checks.comfyui_host import as_prompt, run, start, with_model
from scripts.checks.demo_files import save_checkpoint, save_loras
from scripts.report import save_findings
from sd_ort.demo import scenes
from sd_ort.export.exporter import export
from sd_ort.integrations.application_installers import CONTENT, PACKAGE_FOLDER
from sd_ort.integrations.managed_folder import install_folder
from sd_ort.stages import optimize

WORKFLOWS = PACKAGE_FOLDER / "comfyui" / "workflows"
SCENE = "a yellow circle above a green square on a blue background"
MIN_PSNR, MIN_TILED = 40.0, 25.0


# --- What it works on -----------------------------------------------------------------------------------------------


def prepare(base: Path) -> None:
    """Folders of the demo model with and without a ControlNet, a small SDXL, two LoRAs, and pictures, below `base`."""
    generator = torch.Generator().manual_seed(0)
    unet = diffusers.UNet2DConditionModel.from_pretrained(MODEL / "unet")
    net = diffusers.ControlNetModel.from_unet(unet, conditioning_channels=3)
    for parameter in net.parameters():
        if not parameter.any():  # its last layers begin at zero: a ControlNet that does nothing proves nothing
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.02
    net.save_pretrained(base / "net")
    models: dict[str, dict[str, Any]] = {
        "demo": {"model": "demo"},
        "demo-controlnet": {"model": str(MODEL), "controlnet": str(base / "net")},
        "sdxl-tiny": {"model": None, "preset": "sdxl-tiny", "random_weights": True},
    }
    for name, source in models.items():
        export(out=base / "raw" / name, exporter="torchscript", **source)
        optimize(base / "raw" / name, base / "models" / "sd_ort" / name, target="cpu")
    save_loras(base / "models" / "loras")
    save_checkpoint(base / "models" / "checkpoints" / "checkpoint.safetensors")
    scene = scenes.parse(SCENE)
    pixels = scenes.render(scene, scenes.random_geometry(scene, random.Random(0)))
    (base / "input").mkdir()
    Image.fromarray(pixels).save(base / "input" / "picture.png")
    alpha = np.full((SIDE, SIDE), 255, np.uint8)
    alpha[: SIDE // 2] = 0  # ComfyUI draws where an image is transparent
    Image.fromarray(np.dstack([pixels, alpha])).save(base / "input" / "masked.png")


# --- All of it ------------------------------------------------------------------------------------------------------


def in_tiles(prompt: dict[str, Any]) -> dict[str, Any]:
    """The same workflow, decoded by the stock node in tiles of half the image's side."""
    image: dict[str, Any] = json.loads(json.dumps(prompt))
    for node in image.values():
        if node["class_type"] == "VAEDecode":
            node["class_type"] = "VAEDecodeTiled"
            node["inputs"] |= {"tile_size": SIDE // 2, "overlap": SIDE // 4, "temporal_size": 64, "temporal_overlap": 8}
    return image


@contextlib.contextmanager
def workplace(folder: Path | None) -> Iterator[Path]:
    """A temporary folder, or the one given, which is kept."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="sd-ort-comfyui-") as temporary:
        yield Path(temporary)


@click.command()
@click.option("--comfyui", type=click.Path(path_type=Path), required=True, help="A checkout of ComfyUI.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the findings here.")
@click.option("--work", type=click.Path(path_type=Path), help="Keep models and pictures here, and use what is there.")
def main(comfyui: Path, out: Path | None, work: Path | None) -> None:
    """Run the example workflows in ComfyUI and compare their pictures with our own pipelines'."""
    torch.set_num_threads(1)
    with workplace(work) as base:
        if not (base / "input").is_dir():
            prepare(base)
        install_folder(base / "custom_nodes" / "sd_ort_nodes", CONTENT["comfyui"]())
        execution = start(comfyui.absolute(), base)
        folders, loras = base / "models" / "sd_ort", base / "models" / "loras"
        file = Image.open(base / "input" / "picture.png")
        upper = np.repeat(np.arange(SIDE // 8)[:, None] < SIDE // 16, SIDE // 8, axis=1)
        expected = {
            "text_to_image": lambda: ours(folders / "demo"),
            "image_to_image": lambda: ours_from_picture(folders / "demo", file),
            "two_loras": lambda: ours(
                folders / "demo", loras={loras / "one.safetensors": 0.8, loras / "two.safetensors": -0.5}
            ),
            "controlnet": lambda: ours(
                folders / "demo-controlnet", control_image=file, controlnet_conditioning_scale=0.7
            ),
            "inpainting": lambda: ours_inpainted(folders / "demo", file, upper),
            "sdxl": lambda: ours(folders / "sdxl-tiny", negative_prompt=""),
            "checkpoint": lambda: ours(folders / "demo"),
        }
        prompts = {path.stem: as_prompt(json.loads(path.read_text())) for path in sorted(WORKFLOWS.glob("*.json"))}
        prompts["sdxl"] = with_model(prompts["text_to_image"], model="sdxl-tiny")
        prompts["checkpoint"] = with_model(prompts["text_to_image"], model="checkpoint.safetensors", provider="cpu")
        prompts["tiled"] = in_tiles(prompts["text_to_image"])
        images = {name: run(execution, prompt, base / "output") for name, prompt in prompts.items()}
        psnrs = {name: round(psnr(images[name], make()), 1) for name, make in expected.items()}
        differs = {
            name: round(psnr(images[name], images["text_to_image"]), 1)
            for name in ("two_loras", "controlnet", "inpainting")
        }
        findings = {
            "ComfyUI": importlib.import_module("comfyui_version").__version__,
            "PSNR to our own pipelines, dB": psnrs,
            "PSNR to text to image without them, dB": differs,
            "PSNR of tiles to the whole, dB": round(psnr(images["tiled"], images["text_to_image"]), 1),
            "latent upscale": list(images["latent_upscale"].shape),
        }
        if work:
            shutil.rmtree(base / "compared", ignore_errors=True)
            (base / "compared").mkdir()
            for name, image in images.items():
                Image.fromarray(image).save(base / "compared" / f"{name}.png")
    save_findings(
        "Our nodes in ComfyUI, headless on a CPU", "scripts/checks/comfyui.py --comfyui CHECKOUT", findings, out
    )
    assert all(value >= MIN_PSNR for value in psnrs.values()), f"below {MIN_PSNR} dB"
    assert all(value < MIN_PSNR for value in differs.values()), (
        "a LoRA, ControlNet or mask that changes nothing proves nothing"
    )
    tiled = findings["PSNR of tiles to the whole, dB"]
    assert MIN_TILED <= tiled < 100, "tiles see less of their surroundings, and no less than a little"
    assert images["latent_upscale"].shape == (SIDE * 3 // 2, SIDE * 3 // 2, 3)


if __name__ == "__main__":
    main()
