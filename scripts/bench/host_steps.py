"""What a host's loop costs: diffusers' pipeline on our components beside our own call, in turn, on one folder.

    python scripts/bench/host_steps.py FOLDER --provider cuda [--steps 50] [--rounds 7] [--out results/hosts/x.json]

FOLDER is a Stable Diffusion folder that `sd-ort optimize` wrote. On a GPU diffusers draws twice: its tensors go through
the host's memory (share=False), or ONNX Runtime takes them where they lie (share=True). All draw one picture with DDIM
from the same noise, in float32 as our loop keeps latents; at least 40 dB to our own call's, else the exit status is 1.
A step is the time of a whole picture over its steps, median of the rounds; the ratio to ours is the median of the
rounds' ratios.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from scripts.checks.check_report import report
from scripts.checks.host_tensors_gpu import in_diffusers, models_of
from sd_ort import StableDiffusionPipeline
from sd_ort.core.metrics import psnr

PROMPT = "a red circle on a blue background"
MIN_PSNR = 40.0


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
    side = side or ours.default_size
    noise = torch.randn((1, 4, side // 8, side // 8), generator=torch.Generator().manual_seed(1))
    arguments: dict[str, Any] = {"num_inference_steps": steps, "guidance_scale": 5.0, "height": side, "width": side}

    def own() -> np.ndarray:
        return np.asarray(ours(PROMPT, latents=noise, progress=False, **arguments).images[0])

    def hosted(share: bool) -> Callable[[], np.ndarray]:
        theirs = in_diffusers(models_of(folder, provider, share))
        return lambda: np.asarray(theirs(PROMPT, latents=noise.to(theirs.device), **arguments).images[0])

    draws = {"sd-ort": own, "diffusers, share=False": hosted(False)}
    if provider != "cpu":
        draws["diffusers, share=True"] = hosted(True)
    pictures = {name: draw() for name, draw in draws.items()}
    assert pictures["sd-ort"].std() > 5, "a flat picture proves nothing"
    seconds: dict[str, list[float]] = {name: [] for name in draws}
    for _ in range(rounds):
        for name, draw in draws.items():
            started = time.perf_counter()
            draw()
            seconds[name].append(time.perf_counter() - started)
    own_seconds, hosts = seconds["sd-ort"], list(draws)[1:]
    found = {
        "ms a step of a whole picture": {n: round(1e3 * statistics.median(s) / steps, 3) for n, s in seconds.items()},
        "of ours": {
            name: round(statistics.median(b / a for a, b in zip(own_seconds, seconds[name], strict=True)), 3)
            for name in hosts
        },
        "PSNR to our picture, dB": {name: round(psnr(pictures[name], pictures["sd-ort"]), 1) for name in hosts},
    }
    about = {"folder": folder.name, "provider": provider, "pixels": side, "steps": steps}
    report("diffusers' loop on our components", "scripts/bench/host_steps.py FOLDER", found, out, **about)
    if low := [name for name, decibels in found["PSNR to our picture, dB"].items() if decibels < MIN_PSNR]:
        raise click.ClickException(f"below {MIN_PSNR} dB: {', '.join(low)}")


if __name__ == "__main__":
    main()
