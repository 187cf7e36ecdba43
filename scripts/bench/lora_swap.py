#!/usr/bin/env python3
"""LoRAs on a loaded pipeline: how long a change takes, and what a step takes with one and without.

    python scripts/bench/lora_swap.py [--preset sd15] [--provider cpu] [--float8] [--work FOLDER]

A checkpoint with random weights and two LoRAs of random numbers (rank 8, all linear layers of attention blocks and
text encoders and all 3 x 3 convolutions of residual blocks, in Kohya's names) are made below --work, where they are
kept. Two pipelines draw in turn, one that never saw a LoRA and one with both. The table has the ratio of their steps,
the times of changes beside their goals, what rounds of loading and unloading leave in memory, and whether the image at
strength 0 is the one without, byte for byte. The image with LoRAs is compared with that over reopened sessions, whose
weights are computed by NumPy. Rows of other providers that --out holds are kept; beside the JSON a table is written,
--out with .md.
"""

from __future__ import annotations

import gc
import json
import os
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from scripts.bench.gpu_models import calibration_run
from scripts.checks.soak_gpu import usage
from scripts.report import decibels, save
from scripts.report import table as markdown
from sd_ort import StableDiffusionPipeline
from sd_ort.checkpoints.presets import open_preset
from sd_ort.core.files import read_json
from sd_ort.core.metrics import psnr
from sd_ort.runtime.machine import commit, machine, versions
from sd_ort.runtime.provider_choice import target_of
from sd_ort.stages import optimize

RANK = 8
# Seconds that a change may take at most, by device; SDXL may take twice as long.
GOALS = {"gpu": {"load": 0.5, "strength": 0.1, "unload": 0.05}, "cpu": {"strength": 0.8}}
SIDES = {"sdxl": 1024, "sd15-tiny": 64, "sdxl-tiny": 64}
NAMES = {"unet": "lora_unet_", "text_encoder": "lora_te_", "text_encoder_2": "lora_te2_"}


def checkpoint(preset: str, seed: int, folder: Path) -> None:
    """Write a diffusers folder of a preset with random weights, in float16."""
    folder.mkdir(parents=True)
    source = open_preset(preset, seed)
    source.write_configs(folder)
    for name in source.configs:
        model: Any = source.load(name)
        model.half().save_pretrained(folder / name)


def layers_with_loras(folder: Path, component: str, convolutions: bool = False) -> Iterator[tuple[str, list[int]]]:
    """Module and shape of what a LoRA usually changes: all that is linear in attention blocks and text encoders.

    With `convolutions` also the 3 x 3 convolutions of the UNet's residual blocks.
    """
    for path in sorted((folder / component).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                shape = file.get_slice(name).get_shape()
                linear = name.endswith(".weight") and (len(shape) == 2 or shape[2:] == [1, 1])
                convolution = convolutions and "resnets" in name and name.endswith(".weight") and shape[2:] == [3, 3]
                attention = "attentions" in name or ("encoder.layers" in name and component != "unet")
                if convolution or (linear and attention):
                    yield name.removesuffix(".weight"), shape


def make_lora(folder: Path, out: Path, seed: int, rank: int = RANK, convolutions: bool = True) -> int:
    """Write a LoRA of random numbers in Kohya's names; the number of its modules."""
    generator = torch.Generator().manual_seed(seed)
    xl = (folder / "text_encoder_2").is_dir()
    tensors: dict[str, torch.Tensor] = {}
    for component, prefix in NAMES.items():
        for module, (wide, narrow, *kernel) in layers_with_loras(folder, component, convolutions):
            name = ("lora_te1_" if xl and component == "text_encoder" else prefix) + module.replace(".", "_")
            tensors[f"{name}.lora_down.weight"] = torch.randn(rank, narrow, *kernel, generator=generator) / narrow**0.5
            up = torch.randn(wide, rank, *[1 for _ in kernel], generator=generator)
            tensors[f"{name}.lora_up.weight"] = up * 0.2
            tensors[f"{name}.alpha"] = torch.tensor(float(rank))
    save_file({name: tensor.half() for name, tensor in tensors.items()}, out)
    return len(tensors) // 3


def timed(work: Callable[[], Any]) -> dict[str, float]:
    """Wall and processor seconds of a call."""
    started, used = time.perf_counter(), time.process_time()
    work()
    return {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - used}


def latents_psnr(latents: np.ndarray, reference: np.ndarray) -> float:
    """Return the PSNR in dB with the range of the reference as peak."""
    return psnr(latents, reference, peak=float(np.ptp(reference)))


def drawer(side: int, steps: int) -> Callable[[Any], np.ndarray]:
    def draw(pipeline: Any) -> np.ndarray:
        medians = pipeline("a red circle", num_inference_steps=steps, height=side, width=side, generator=0,
                        output_type="latent", progress=False)  # fmt: skip
        return np.asarray(medians.images)

    return draw


def step_seconds(draw: Callable[[Any], Any], pipeline: Any, steps: int) -> float:
    """Of a drawing: on a GPU the steps on the device, on a CPU the processor's time of the whole call, by its steps."""
    pipeline.loop.step_seconds = None
    call = timed(lambda: draw(pipeline))
    return float(pipeline.loop.step_seconds or call["cpu_seconds"] / steps)


def opened(pipeline: Any) -> list[Any]:
    """The sessions that LoRAs change, not kept. Where they were closed, opening them is part of a change."""
    names = [name for name in ("text_encoder", "text_encoder_2", "unet") if name in pipeline.models]
    return [weakref.ref(pipeline.models[name].session) for name in names]


def change(pipeline: Any, call: Callable[[], Any]) -> None:
    """Make a change, ready for the next image."""
    call()
    opened(pipeline)


def median_times(name: str, calls: list[Callable[[], Any]], pipeline: Any) -> dict[str, float]:
    """Return the medians of changes, each ready for the next call."""
    times = [timed(partial(change, pipeline, call)) for call in calls]
    medians = {key: round(median(each[key] for each in times), 4) for key in times[0]}
    click.echo(f"{name}: {medians}")
    return medians


def load_rounds(pipeline: Any, lora: Path, draw: Callable[[Any], Any], rounds: int) -> dict[str, Any]:
    """Load, draw and unload in turn: the medians, and what the rounds after the first leave behind."""
    row: dict[str, Any] = {"load": [], "unload": []}
    used = []
    for _ in range(rounds + 1):
        row["load"].append(timed(partial(change, pipeline, partial(pipeline.load_lora_weights, lora, "round"))))
        draw(pipeline)
        row["unload"].append(timed(partial(change, pipeline, pipeline.unload_lora_weights)))
        gc.collect()
        used.append(usage())
    for name in ("load", "unload"):
        row[name] = {key: round(median(each[key] for each in row[name][1:]), 4) for key in row[name][0]}
    row["growth"] = {name: used[-1][name] - used[0][name] for name in used[0] if used[0][name] is not None}
    click.echo(json.dumps(row))
    return row


def changes(pipeline: Any, rounds: int) -> dict[str, dict[str, float]]:
    """Return the medians of `rounds` changes of the strengths of two loaded LoRAs, by name."""
    first, second = pipeline.get_list_adapters()["unet"]
    use = pipeline.set_adapters
    calls_by_name: dict[str, list[Callable[[], Any]]] = {
        "strength": [partial(use, first, 0.3 + 0.1 * i) for i in range(rounds)],
        "other LoRA": [partial(use, [second, first][i % 2], 0.8) for i in range(rounds)],
        "two LoRAs": [partial(use, [first, second], [0.8, -0.1 * i]) for i in range(rounds)],
        "strength 0": [partial(use, [first, second], 0.0)],
    }
    return {name: median_times(name, calls, pipeline) for name, calls in calls_by_name.items()}


def measure(folder: Path, loras: list[Path], provider: str, side: int, steps: int, rounds: int) -> dict[str, Any]:
    """The row of a provider."""
    draw = drawer(side, steps)
    plain, ours = (StableDiffusionPipeline.from_pretrained(folder, provider) for _ in range(2))
    untouched = draw(plain)
    draw(ours)
    row: dict[str, Any] = {"in place": ours.models.in_place, **load_rounds(ours, loras[0], draw, rounds)}
    row["image after unloading as before"] = bool(np.array_equal(draw(ours), untouched))
    before = usage()
    for path in loras:
        ours.load_lora_weights(path, path.stem)
    ours.set_adapters([path.stem for path in loras])
    with_loras = draw(ours)
    row["memory of LoRAs"] = {name: used - before[name] for name, used in usage().items() if used is not None}
    click.echo(f"memory of LoRAs: {row['memory of LoRAs']}")
    sessions = opened(ours)
    times: dict[str, list[float]] = {"without": [], "with": []}
    for _ in range(rounds):
        times["without"].append(step_seconds(draw, plain, steps))
        times["with"].append(step_seconds(draw, ours, steps))
    row["step"] = {name: median(seconds) for name, seconds in times.items()}
    row["step ratio"] = round(row["step"]["with"] / row["step"]["without"], 4)
    click.echo(f"step with LoRAs / without: {row['step ratio']}")
    row["changes"] = changes(ours, rounds)
    row["image at strength 0 as without"] = bool(np.array_equal(draw(ours), untouched))
    row["sessions reopened"] = opened(ours) != sessions
    ours.set_adapters([path.stem for path in loras])
    row["image as after loading"] = bool(np.array_equal(draw(ours), with_loras))
    row["PSNR to without"] = round(latents_psnr(with_loras, untouched), 1)
    plain.models.in_place = False
    for path in loras:
        plain.load_lora_weights(path, path.stem)
    plain.set_adapters([path.stem for path in loras])
    row["PSNR to reopened sessions"] = round(latents_psnr(draw(plain), with_loras), 1)
    return row


def table(result: dict[str, Any]) -> str:
    rows = result["rows"]
    missed, unmeasured = [], set(GOALS)
    for name, row in rows.items():
        device, factor = "cpu" if name.endswith(" cpu") else "gpu", 2 if name.startswith("sdxl") else 1
        goals = GOALS[device]
        unmeasured.discard(device)
        seconds = {"load": row["load"], "unload": row["unload"], **row["changes"]}
        missed += [f"{name}: {change} {seconds[change]['seconds']} s of {goal * factor}"
                   for change, goal in goals.items() if seconds[change]["seconds"] > goal * factor]  # fmt: skip
    lines = [
        "# LoRAs on a loaded pipeline", "",
        f"Goals missed: {'; '.join(missed) or 'none'} (a GPU: load 0.5 s, strength 0.1, unload 0.05, SDXL twice that; "
        "two CPU cores: strength 0.8)."
        + "".join(f" Not measured here: the goals of a {device.upper()}." for device in sorted(unmeasured)), "",
        f"Random weights, LoRAs of random numbers of rank {RANK} over all linear layers of attention blocks and text "
        "encoders and the 3 x 3 convolutions of residual blocks. In place: nothing is reopened, and captured graphs "
        "stay valid. Not in place (a CPU): sessions are opened again, which the times include. A CPU's steps are its "
        "processor's time, a whole call by its steps. Times are medians, in brackets of CPU time. Growth: what rounds "
        "of loading and unloading after the first left, allocated by malloc and resident (malloc retains up to 64 MB "
        "of freed memory a thread). Made by `python scripts/bench/lora_swap.py`.",
        "",
    ]  # fmt: skip
    cells = []
    for name, row in rows.items():
        every = [row["load"], *row["changes"].values(), row["unload"]]
        cells.append([
            name, "yes" if row["in place"] else "no", f"{row['step ratio']:.3f}",
            *(f"{each['seconds']:.3f} s ({each['cpu_seconds']:.2f})" for each in every),
            ", ".join(f"{value} {kind}" for kind, value in row["growth"].items()),
            "bit for bit" if row["image at strength 0 as without"] else "no",
            decibels(row["PSNR to reopened sessions"]), row["load average"],
        ])  # fmt: skip
    names = ("model, provider", "in place", "step with / without", "load", "strength", "other LoRA", "two LoRAs",
             "strength 0", "unload", "growth", "strength 0 is without", "PSNR to NumPy's weights",
             "load average")  # fmt: skip
    lines += markdown(names, cells)
    machines = {f"{json.dumps(row['machine'])}, commit {row['commit']}" for row in rows.values()}
    return "\n".join(lines) + "\n\n" + "\n".join(f"`{each}`" for each in sorted(machines)) + "\n"


@click.command()
@click.option("--preset", default="sd15", show_default=True)
@click.option("--provider", default="cpu", show_default=True)
@click.option("--float8", is_flag=True, help="Linears of the U-Net in float8, calibrated on random inputs.")
@click.option("--steps", default=None, type=int, help="Of an image; 20 on a GPU and 1 on a CPU when not given.")
@click.option("--side", type=int, help="Pixels of an image; the model's own when not given.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--work", type=click.Path(path_type=Path), default=Path("out/lora_swap"), show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=Path("results/lora.json"), show_default=True)
def main(
    preset: str, provider: str, float8: bool, steps: int | None, side: int | None, rounds: int, work: Path, out: Path
) -> None:
    target = target_of(provider)
    model, folder = work / preset, work / f"{preset}-{target}{'-float8' if float8 else ''}"
    if not model.is_dir():
        checkpoint(preset, 1, model)
    loras = [work / f"{preset}-{seed}.safetensors" for seed in (1, 2)]
    modules = [make_lora(model, path, seed) for seed, path in enumerate(loras)]
    if not folder.is_dir():
        dtype = "float32" if provider == "cpu" else "float16"
        inputs = calibration_run(preset, work / f"{preset}-runs.npz") if float8 else None
        optimize(
            str(model), folder, target=target, dtype=dtype, calibrate=False, on_progress=click.echo,
            eight_bits="float8" if float8 else None, inputs=inputs,
        )  # fmt: skip
    steps = steps or (1 if provider == "cpu" else 20)
    row = measure(folder, loras, provider, side or SIDES.get(preset, 512), steps, rounds)
    row |= {"modules": modules[0], "steps": steps, "load average": round(os.getloadavg()[0], 1)}
    row |= {"machine": machine(), "versions": versions(), "commit": commit()}
    result = read_json(out) if out.is_file() else {"rows": {}}
    result["rows"] = {name: each for name, each in result["rows"].items() if "load" in each}  # of this script's format
    result["rows"][f"{preset}{' in float8' if float8 else ''}, {provider}"] = row
    save(out, result, table(result))
    click.echo(json.dumps({key: value for key, value in row.items() if key not in ("machine", "versions")}, indent=1))


if __name__ == "__main__":
    main()
