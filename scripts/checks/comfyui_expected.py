"""Reference images for ComfyUI: those of our own pipelines from ComfyUI's initial noise."""

from __future__ import annotations

import json
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from PIL import Image

from sd_ort import StableDiffusionPipeline, demo
from sd_ort.core import metrics
from sd_ort.integrations.diffusers import accelerate
from sd_ort.integrations.models import TorchComponentSessions

PROMPT, SEED, STEPS, GUIDANCE, SIDE = "a red circle on a blue background", 7, 10, 3.0, demo.HEIGHT
MODEL = Path(demo.__file__).parent / "model"


def euler(folder: Path) -> Any:
    """diffusers' scheduler of ComfyUI's sampler `euler` with its scheduler `normal`."""
    config = json.loads((folder / "scheduler" / "scheduler_config.json").read_text())
    return diffusers.EulerDiscreteScheduler.from_config(config, timestep_spacing="linspace")


def noise() -> torch.Tensor:
    """Return ComfyUI's initial noise of the seed: (1, 4, h, w), float32."""
    return torch.randn((1, 4, SIDE // 8, SIDE // 8), generator=torch.Generator().manual_seed(SEED))


def ours(folder: Path, provider: str = "cpu", **more: Any) -> np.ndarray:
    """Text to image by `StableDiffusionPipeline`, of SD or SDXL; uint8."""
    loras = more.pop("loras", {})
    scheduler = euler(folder)
    pipeline = StableDiffusionPipeline.from_pretrained(folder, provider, scheduler=scheduler)
    for path in loras:
        pipeline.load_lora_weights(path, path.stem)
    if loras:
        pipeline.set_adapters([path.stem for path in loras], list(loras.values()))
    scheduler.set_timesteps(STEPS)
    top = float(scheduler.sigmas[0])
    # ComfyUI begins with sqrt(1 + sigma^2) of the noise, diffusers' euler at these timesteps with sigma of it.
    arguments = {"num_inference_steps": STEPS, "guidance_scale": GUIDANCE, "height": SIDE, "width": SIDE}
    start = noise() * (1 + top**2) ** 0.5 / top
    images = pipeline(PROMPT, latents=start, output_type="np", progress=False, **arguments, **more).images
    return eight_bits(images[0])


def in_diffusers(folder: Path) -> Any:
    """diffusers' image-to-image pipeline of the demo model on the folder's components."""
    torchs = diffusers.StableDiffusionImg2ImgPipeline.from_pretrained(
        MODEL, safety_checker=None, requires_safety_checker=False, feature_extractor=None
    )
    pipeline = accelerate(torchs, folder, provider="cpu")
    pipeline.scheduler = euler(folder)
    return pipeline


def encoded(folder: Path, image: Image.Image) -> torch.Tensor:
    """The mean of the image's unscaled latents, as ComfyUI encodes."""
    pixels = torch.from_numpy(np.asarray(image, np.float32) / 127.5 - 1).permute(2, 0, 1)[None]
    moments = TorchComponentSessions(folder, "cpu").run("vae_encoder", sample=pixels)["latent_parameters"]
    return moments.chunk(2, 1)[0]


def ours_from_picture(folder: Path, image: Image.Image) -> np.ndarray:
    """Image to image on the same components, from the image's latents; uint8."""
    pipeline = in_diffusers(folder)
    latents = encoded(folder, image) * pipeline.vae.config.scaling_factor
    generator = torch.Generator().manual_seed(SEED)
    images = pipeline(
        PROMPT, image=latents, strength=0.5, num_inference_steps=STEPS, guidance_scale=GUIDANCE, generator=generator,
        output_type="np",
    ).images  # fmt: skip
    return eight_bits(images[0])


@torch.no_grad()
def ours_inpainted(folder: Path, image: Image.Image, mask: np.ndarray) -> np.ndarray:
    """Return the image (uint8) inpainted where the latent mask (h, w) is 1, like ComfyUI with a standard UNet.

    Before each step the latents outside the mask are replaced by the image's with the step's noise, and after it by the
    image's.
    """
    pipeline = in_diffusers(folder)
    scale = pipeline.vae.config.scaling_factor
    original, over, noised = encoded(folder, image) * scale, torch.from_numpy(mask).float(), noise()
    with_text, without_text = pipeline.encode_prompt(PROMPT, "cpu", 1, True, negative_prompt="")
    scheduler = pipeline.scheduler
    scheduler.set_timesteps(STEPS)
    sigmas = scheduler.sigmas.tolist()
    x = original + noised * (1 + sigmas[0] ** 2) ** 0.5
    for t, (now, after) in zip(scheduler.timesteps, pairwise(sigmas), strict=True):
        blended = x * over + (original + noised * now) * (1 - over)
        rows = scheduler.scale_model_input(blended, t).repeat(2, 1, 1, 1)
        without, with_prompt = pipeline.unet(rows, t, torch.cat([without_text, with_text])).sample.chunk(2)
        clean = scheduler.step(without + GUIDANCE * (with_prompt - without), t, blended).pred_original_sample
        clean = clean * over + original * (1 - over)
        x = x + (x - clean) / now * (after - now)
    return decoded(folder, x / scale)


def decoded(folder: Path, latents: torch.Tensor) -> np.ndarray:
    """The image of unscaled latents; uint8."""
    decoded = (
        TorchComponentSessions(folder, "cpu")
        .run("vae_decoder", latent_sample=latents)["sample"][0]
        .permute(1, 2, 0)
        .numpy()
    )
    return eight_bits((decoded / 2 + 0.5).clip(0, 1))


def eight_bits(image: np.ndarray) -> np.ndarray:
    """As ComfyUI saves images."""
    return (255.0 * image).clip(0, 255).astype(np.uint8)


psnr = partial(metrics.psnr, min_std=10)
