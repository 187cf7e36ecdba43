"""One image in bands of rows on several devices: time and PSNR beside one device.

    split_image.py FOLDER --devices 0 1 2 3 --provider sdcuda --side 1024 --steps 20 --guidance 8 --out SPEED.json
    split_image.py --quality                         unseen prompts of the demo model on the CPU, by how often all rows
                                                     are computed; writes results/split_image.{json,md}

Images are generated in turn: on one device, on two with guidance split and, with four devices or more, or without
guidance, in bands. `whole_ms` and `band_ms` are U-Net calls for all rows and for a band on one device, `extrapolate_ms`
what a band needs before, `sent_MB` what a device sends in a step: times by the device's own events.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from scripts.bench.two_gpus import device_seconds, newest
from sd_ort import StableDiffusionPipeline, demo
from sd_ort.core import files, metrics
from sd_ort.demo.fidelity import unseen_prompts
from sd_ort.pipelines import partial_steps
from sd_ort.runtime import machine
from sd_ort.stages import optimize

WARM_UP = 2  # images of each kind that do not count
GOALS = {2: 1.7, 4: 2.6}  # times one device's step, SDXL at 1024 x 1024
PSNR_GOAL = 25.0  # dB, to the image of one device
# Whole steps: the first so many, and from then on one in so many (200: none).
VARIANTS = ((4, 200), (4, 16), (4, 8), (4, 5), (8, 8), (2, 8))
SIDE = 128  # pixels of the demo's images in two bands: its U-Net has four levels


def measure(
    folder: Path, provider: str, arguments: Mapping[str, Any], rounds: int, devices: Sequence[int]
) -> dict[str, Any]:
    """Measure a folder. arguments: of each pipeline call; rounds: images of each configuration."""
    kinds: dict[str, dict[str, Any]] = {"one": {}}
    is_guided = arguments["guidance_scale"] > 1
    if is_guided:
        kinds["guidance"] = {"split_guidance": tuple(devices[:2])}
    if not is_guided or len(devices) >= 4:
        kinds["bands"] = {"split_image": tuple(devices)}
    report: dict[str, Any] = {"devices": len(devices), "image_s": {}, "step_ms": {}, "psnr_db": {}}
    images = {}
    for name, placement in kinds.items():  # one after the other: each holds its weights on all of its devices
        pipeline = StableDiffusionPipeline.from_pretrained(folder, provider, device_loop=True, **placement)
        seconds, steps = [], []
        for number in range(WARM_UP + rounds):
            start = time.perf_counter()
            images[name] = np.asarray(pipeline(**arguments).images[0])
            if number >= WARM_UP:
                seconds.append(time.perf_counter() - start)
                steps.append(float(pipeline.loop.step_seconds))
        report["image_s"][name], report["step_ms"][name] = median(seconds), 1e3 * median(steps)
        report["psnr_db"][name] = metrics.psnr(images[name], images["one"])
        if name == "bands":
            report |= band_times(pipeline.loop)
        print(f"{name}: {report['step_ms'][name]:.2f} ms a step, {report['image_s'][name]:.3f} s an image, "
              f"{report['psnr_db'][name]:.1f} dB", flush=True)  # fmt: skip
        del pipeline
    one = report["step_ms"]["one"]
    report["step_speedup"] = {name: one / step for name, step in report["step_ms"].items()}
    report["image_speedup"] = {name: report["image_s"]["one"] / each for name, each in report["image_s"].items()}
    return report


def band_times(loop: Any) -> dict[str, float]:
    """Return milliseconds of a step of all rows and of a band on the first device, and the number of bytes sent."""
    unet = newest(loop).band_unet
    times: dict[str, float] = {}
    with loop.models.lock:
        for name, runs in {
            "whole_ms": unet.full[:1],
            "band_ms": (unet.cut, unet.rows),
            "extrapolate_ms": unet.extrapolate[:1],
        }.items():
            times[name] = 1e3 * device_seconds(loop, partial(run_all, runs), 20)
    others = [other.buffer_cache for other in loop.loops[1 : unet.band.count]]
    peers = [next(reversed(cache.values())).band_unet for cache in others]
    times["sent_MB"] = sum(span.size for peer in peers for span, _ in unet.copies_to(peer)) / 1e6
    return times


def run_all(runs: Sequence[Any]) -> None:
    """Queue runs."""
    for run in runs:
        run.run(False)


def quality(work: Path, prompts: int) -> list[dict[str, Any]]:
    """Return for each of `VARIANTS` the PSNR to one device's images, and how many images are right."""
    folder = work / "fused"
    optimize("demo", folder, target="cpu")
    texts = unseen_prompts(prompts, 0)
    settings: dict[str, Any] = {
        "height": SIDE, "width": SIDE, "num_inference_steps": demo.STEPS, "guidance_scale": demo.GUIDANCE,
        "progress": False,
    }  # fmt: skip

    def draw(pipeline: Any) -> np.ndarray:
        return np.stack([np.asarray(pipeline(text, generator=n, **settings).images[0]) for n, text in enumerate(texts)])

    expected = draw(StableDiffusionPipeline.from_pretrained(folder, "cpu", device_loop=True))
    pipeline = StableDiffusionPipeline.from_pretrained(folder, "cpu", split_image=range(4))
    make, rows = pipeline.loop._for_band, []
    for whole_steps, interval in VARIANTS:

        def variant(*arguments: Any, first: int = whole_steps, every: int = interval) -> Any:
            job = make(*arguments)
            return replace(job, band=replace(job.band, full_steps=first, interval=every))

        pipeline.loop._for_band = variant
        images = draw(pipeline)
        decibels = sorted(metrics.psnr(image, one) for image, one in zip(images, expected, strict=True))
        steps = partial_steps.BandSteps(0, 2, lambda: None, whole_steps, interval)  # type: ignore[arg-type,return-value]
        rows.append({
            "whole_steps": whole_steps, "interval": interval,
            "whole": sum(steps.is_full(step) for step in range(demo.STEPS)), "psnr_db": decibels,
        })  # fmt: skip
        print(f"{whole_steps}, {interval}: median {median(decibels):.1f} dB, worst {decibels[0]:.1f}", flush=True)
    return rows


def page(report: Mapping[str, Any]) -> str:
    lines = [
        "# One image in two bands of rows", "",
        f"{report['prompts']} unseen prompts of the demo model at {SIDE} x {SIDE}, {demo.STEPS} steps, guidance "
        f"{demo.GUIDANCE:g}, float32 on a CPU: two halves of guidance times two bands (`--split-image 0,1,2,3`). PSNR "
        "is to the image of one device. A band is 8 of 16 rows of latents, one at the lowest level: larger images have "
        "fewer rows next to another band. `generate` computes all rows in the steps of the row in bold.", "",
        "| first whole steps | then one in | whole, of all | median PSNR | worst |",
        "|---|---|---|---|---|",
    ]  # fmt: skip
    for row in report["rows"]:
        chosen = (row["whole_steps"], row["interval"]) == (partial_steps.FULL_STEPS, partial_steps.FULL_INTERVAL)
        mark = "**" if chosen else ""
        every = row["interval"] if row["interval"] <= demo.STEPS else "none"
        lines.append(f"| {mark}{row['whole_steps']}{mark} | {mark}{every}{mark} | {row['whole']} of {demo.STEPS} "
                     f"| {median(row['psnr_db']):.1f} dB | {min(row['psnr_db']):.1f} dB |")  # fmt: skip
    lines += ["", f"`{report['command']}` at {report['commit']}, {report['machine']['cpu']}", ""]
    return "\n".join(lines)


def main() -> int:
    """Command line; returns the exit code: 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="pipeline folder, to time")
    parser.add_argument("--quality", action="store_true", help="the demo model's images")
    parser.add_argument("--prompts", type=int, default=4, help="of --quality (4)")
    parser.add_argument("--devices", type=int, nargs="+", default=[0, 1, 2, 3], help="of one image (0 1 2 3)")
    parser.add_argument("--provider", default="cpu", help="execution provider (cpu)")
    parser.add_argument("--side", type=int, default=1024, help="pixels (1024)")
    parser.add_argument("--steps", type=int, default=20, help="denoising steps (20)")
    parser.add_argument("--guidance", type=float, default=8.0, help="guidance scale (8)")
    parser.add_argument("--rounds", type=int, default=3, help="images of each kind (3)")
    parser.add_argument("--work", type=Path, default=Path("out/split_image"), help="folder for the demo model")
    parser.add_argument("--out", type=Path, default=Path("results/split_image.json"), help="the result")
    options = parser.parse_args()
    if not options.quality and options.folder is None:
        parser.error("give a pipeline folder, or --quality")
    report: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["scripts/bench/split_image.py", *sys.argv[1:]]),
        "commit": machine.commit(), "machine": machine.machine(), "versions": machine.versions(),
    }  # fmt: skip
    if options.quality:
        report |= {"prompts": options.prompts, "rows": quality(options.work, options.prompts)}
        files.write_json(options.out, report)
        files.write_text(options.out.with_suffix(".md"), page(report))
        return 0
    arguments = {
        "prompt": "a red circle left of a small blue square", "num_inference_steps": options.steps, "progress": False,
        "guidance_scale": options.guidance, "height": options.side, "width": options.side, "generator": 0,
    }  # fmt: skip
    report |= measure(options.folder, options.provider, arguments, options.rounds, options.devices)
    files.write_json(options.out, report)
    if "bands" not in report["psnr_db"]:
        return 0
    speedup, decibel = report["step_speedup"]["bands"], report["psnr_db"]["bands"]
    goal = GOALS.get(len(options.devices), 0.0) if options.provider != "cpu" else 0.0
    print(f"{speedup:.2f} times one device (goal {goal}), {decibel:.1f} dB (goal {PSNR_GOAL})")
    return 1 if speedup < goal or decibel < PSNR_GOAL else 0


if __name__ == "__main__":
    sys.exit(main())
