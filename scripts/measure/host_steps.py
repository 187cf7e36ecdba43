"""What a host's loop costs: diffusers' pipeline on our components beside our own call, in turn, on one folder.

    python scripts/measure/host_steps.py FOLDER --provider cuda [--steps 50] [--rounds 7] [--out results/hosts/x.json]

FOLDER is a Stable Diffusion folder that `sd-ort optimize` wrote. Both draw one picture from the same noise; the PSNR
between the two is given. A step is the time of a whole picture over its steps, median of the rounds.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import click
import diffusers
import numpy as np
import torch

from sd_ort import StableDiffusionPipeline
from sd_ort.hosts.diffusers import OrtTextEncoder, OrtUNet, OrtVae
from sd_ort.hosts.models import HostModels
from sd_ort.runtime import machine

PROMPT = "a red circle on a blue background"


def in_diffusers(folder: Path, provider: str) -> Any:
    """diffusers' own pipeline on the folder's components."""
    models = HostModels(folder, provider, share=True)
    scheduler = diffusers.DDIMScheduler.from_pretrained(folder / "scheduler")
    made = diffusers.StableDiffusionPipeline(
        OrtVae(models), OrtTextEncoder(models), models.tokenizer("text_encoder"), OrtUNet(models), scheduler,
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    made.set_progress_bar_config(disable=True)
    return made


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--provider", default="cpu", show_default=True)
@click.option("--steps", default=50, show_default=True)
@click.option("--rounds", default=7, show_default=True)
@click.option("--side", type=int, help="Pixels [default: the model's].")
@click.option("--out", type=click.Path(path_type=Path))
def main(folder: Path, provider: str, steps: int, rounds: int, side: int | None, out: Path | None) -> None:
    """Time both and compare their pictures."""
    ours = StableDiffusionPipeline.from_pretrained(folder, provider, scheduler="ddim")
    theirs = in_diffusers(folder, provider)
    side = side or ours.default_size
    noise = torch.randn((1, 4, side // 8, side // 8), generator=torch.Generator().manual_seed(1))
    arguments = {"num_inference_steps": steps, "guidance_scale": 5.0, "height": side, "width": side}

    def own() -> np.ndarray:
        return np.asarray(ours(PROMPT, latents=noise, progress=False, **arguments).images[0])

    def hosted() -> np.ndarray:
        latents = noise.to(theirs.device, theirs.unet.dtype)
        return np.asarray(theirs(PROMPT, latents=latents, **arguments).images[0])

    pictures = [own(), hosted()]
    seconds: dict[str, list[float]] = {"sd-ort": [], "diffusers on sd-ort": []}
    for _ in range(rounds):
        for name, draw in (("sd-ort", own), ("diffusers on sd-ort", hosted)):
            started = time.perf_counter()
            draw()
            seconds[name].append(time.perf_counter() - started)
    assert pictures[0].std() > 5, "a flat picture proves nothing"
    off = np.mean((pictures[0].astype(float) - pictures[1]) ** 2)
    found = {
        "machine": machine.machine(),
        "versions": machine.versions(),
        "commit": machine.commit(),
        "folder": folder.name,
        "provider": provider,
        "pixels": side,
        "steps": steps,
        "ms a step of a whole picture": {n: round(1e3 * statistics.median(s) / steps, 3) for n, s in seconds.items()},
        "diffusers of ours": round(statistics.median(b / a for a, b in zip(*seconds.values(), strict=True)), 3),
        "PSNR of the pictures, dB": round(float(10 * np.log10(255**2 / max(off, 1e-6))), 1),
    }
    text = json.dumps(found, indent=1)
    click.echo(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")


if __name__ == "__main__":
    main()
