"""A step inside ComfyUI's sampler beside our own loop, and a picture of its executor beside our own pipeline's.

    python scripts/bench/comfyui_steps.py --comfyui CHECKOUT --drawn DEMO --timed SD15 --provider cuda [--out X.json]

CHECKOUT as for scripts/checks/comfyui.py. DEMO: the demo model as `sd-ort optimize` wrote it, with which the example
workflow text_to_image is run; at least 40 dB to our own pipeline's picture, else the exit status is 1. SD15: any Stable
Diffusion folder. Both loops draw its latents with Euler from one noise. A step is what a picture of many steps takes
more than one of few, over the steps between: loading, prompts and waiting for the end are left out. Both have their
schedules beforehand: ours keeps them, and ComfyUI's, worked out on the device number by number, is given to its
sampler. The loops take turns; the ratio is the median of the rounds' ratios. On a GPU tensors are bound where ComfyUI
has them, or it fails. Then one picture of ComfyUI's is watched (`comfyui_watch`): captures, replays, waits, and where
the host's time goes.
"""

from __future__ import annotations

import importlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch

from scripts.checks.check_report import report
from scripts.checks.comfyui_expected import GUIDANCE, PROMPT, SEED, euler, ours, psnr
from scripts.checks.comfyui_host import as_prompt, run, start, with_model
from sd_ort import StableDiffusionPipeline
from sd_ort.integrations.application_installers import CONTENT, HERE
from sd_ort.integrations.managed_folder import install_folder
from sd_ort.integrations.models import TorchComponentSessions

WORKFLOW = HERE / "comfyui" / "workflows" / "text_to_image.json"
MIN_PSNR = 40.0
Draw = Callable[[int], Any]


def in_comfyui(folder: Path, provider: str, side: int) -> Draw:
    """Latents by ComfyUI's sampler on the folder's MODEL and CLIP, for a number of steps."""
    from sd_ort.integrations.comfyui.clip import open_clip
    from sd_ort.integrations.comfyui.model import open_model

    models = TorchComponentSessions(folder, provider)
    if provider != "cpu" and not models.shared:
        raise click.ClickException(f"torch and {provider} share no device here: torch sees {torch.cuda.device_count()}")
    loaded, clip = open_model(models), open_clip(TorchComponentSessions(folder, provider))
    conditionings = [importlib.import_module("nodes").CLIPTextEncode().encode(clip, text)[0] for text in (PROMPT, "")]
    sample, samplers = (importlib.import_module(f"comfy.{name}") for name in ("sample", "samplers"))
    empty = torch.zeros(1, models.unet_config["in_channels"], side // 8, side // 8)
    noise = sample.prepare_noise(empty, SEED)
    euler_sampler = samplers.sampler_object("euler")

    @cache
    def sigmas(steps: int) -> torch.Tensor:
        schedule: torch.Tensor = samplers.calculate_sigmas(loaded.get_model_object("model_sampling"), "normal", steps)
        return schedule

    def draw(steps: int) -> Any:
        with torch.inference_mode():
            latents = sample.sample_custom(
                loaded, noise, GUIDANCE, euler_sampler, sigmas(steps), *conditionings, empty, disable_pbar=True,
                seed=SEED,
            )  # fmt: skip
            return latents.cpu()

    return draw


def left(draw: Draw) -> Draw:
    """The same with prompts where ComfyUI leaves them: see `hosts.comfyui.model`."""
    from sd_ort.integrations.comfyui.model import PromptsOnSamplerDevice

    def extra_conds(self: PromptsOnSamplerDevice, **conditionings: Any) -> Any:
        return super(PromptsOnSamplerDevice, self).extra_conds(**conditionings)  # type: ignore[misc]

    def drawn(steps: int) -> Any:
        with mock.patch.object(PromptsOnSamplerDevice, "extra_conds", extra_conds):
            return draw(steps)

    return drawn


def in_own_loop(folder: Path, provider: str, side: int) -> Draw:
    """Latents by `StableDiffusionPipeline`, for a number of steps."""
    pipeline = StableDiffusionPipeline.from_pretrained(folder, provider, scheduler=euler(folder))
    return lambda steps: pipeline(
        PROMPT, num_inference_steps=steps, guidance_scale=GUIDANCE, height=side, width=side, generator=SEED,
        progress=False, output_type="latent",
    )  # fmt: skip


def step_times(draws: dict[str, Draw], few: int, many: int, rounds: int) -> dict[str, Any]:
    """Median ms a step of the ways to draw, and the ratio of each to the last."""
    for draw in draws.values():
        draw(many), draw(few)
    found: dict[str, list[float]] = {name: [] for name in draws}
    for _ in range(rounds):
        for name, draw in draws.items():
            at = [time.perf_counter()]
            for steps in (few, many):
                draw(steps)
                at.append(time.perf_counter())
            found[name].append(1e3 * ((at[2] - at[1]) - (at[1] - at[0])) / (many - few))
    *hosts, own = found
    return {
        "ms a step": {name: round(statistics.median(values), 3) for name, values in found.items()},
        **{
            f"{name} of {own}": round(statistics.median(a / b for a, b in zip(found[name], found[own], strict=True)), 3)
            for name in hosts
        },
    }


@click.command()
@click.option("--comfyui", type=click.Path(path_type=Path, exists=True), required=True, help="A checkout of ComfyUI.")
@click.option("--drawn", type=click.Path(path_type=Path, exists=True), help="The demo model's folder.")
@click.option("--timed", type=click.Path(path_type=Path, exists=True), help="Another folder, or the same.")
@click.option("--provider", default="cpu", show_default=True)
@click.option("--steps", type=(int, int), default=(10, 30), show_default=True, help="Few and many.")
@click.option("--rounds", default=7, show_default=True)
@click.option("--side", default=512, show_default=True, help="Pixels of the timed pictures' sides.")
@click.option("--out", type=click.Path(path_type=Path))
def main(
    comfyui: Path, drawn: Path | None, timed: Path | None, provider: str, steps: tuple[int, int], rounds: int,
    side: int, out: Path | None,
) -> None:  # fmt: skip
    """Run ComfyUI headless, compare a picture, time steps."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="sd-ort-comfyui-") as work:
        base = Path(work)
        (base / "models" / "sd_ort").mkdir(parents=True)
        if drawn:
            (base / "models" / "sd_ort" / "demo").symlink_to(drawn.absolute(), target_is_directory=True)
        install_folder(base / "custom_nodes" / "sd_ort_nodes", CONTENT["comfyui"]())
        execution = start(comfyui.absolute(), base, cpu=provider == "cpu")
        found["ComfyUI"] = importlib.import_module("comfyui_version").__version__
        found["its device"] = str(importlib.import_module("comfy.model_management").get_torch_device())
        if drawn:
            prompt = with_model(as_prompt(json.loads(WORKFLOW.read_text())), model="demo", provider=provider)
            picture = run(execution, prompt, base / "output")
            found["PSNR to our own pipeline, dB"] = round(psnr(picture, ours(drawn, provider)), 1)
        if timed:
            inside = in_comfyui(timed, provider, side)
            draws = {
                "ComfyUI": inside,
                "ComfyUI, prompts left on the host": left(inside),
                "own loop": in_own_loop(timed, provider, side),
            }
            found |= {
                "timed": "/".join(timed.absolute().parts[-2:]),
                "pixels": side,
                "steps": list(steps),
                "rounds": rounds,
            }
            found |= step_times(draws, *steps, rounds)
            found["a step in ComfyUI"] = importlib.import_module("comfyui_watch").watched(
                draws["ComfyUI"], steps[1], provider
            )
    report("A step in ComfyUI's sampler", "scripts/bench/comfyui_steps.py", found, out, provider=provider)
    if drawn and found["PSNR to our own pipeline, dB"] < MIN_PSNR:
        raise click.ClickException(f"the picture is below {MIN_PSNR} dB")


if __name__ == "__main__":
    main()
