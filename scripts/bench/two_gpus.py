#!/usr/bin/env python3
"""One pipeline on two GPUs: guidance split between them, and decoding on one while the other draws.

    default_pipeline.py make sdxl --graphs DIR --work W && default_pipeline.py make sd15 --graphs DIR --work W
    two_gpus.py W sdxl sd15                        # 3 to 5 minutes; writes results/two_gpus.{json,md}
    two_gpus.py W demo sd15 --quick                # 20 s: pictures with the split against those without; exit code 1
                                                   # when that of one step differs by more than rounding

On a CPU (`--provider cpu`, presets sd15-tiny and sdxl-tiny) the devices are two groups of threads: a dry run. Weights
are random. What is compared runs in turn, in one process, on the same sessions.

    step_ms      a step of a whole picture, on the device, one picture at a time: UNet, guidance, scheduler, exchange
    unet_ms      calls of the UNet alone, of both rows on one device and of one row on each
    exchange_us  a step without UNet and scheduler: two copies, four events and, mostly, the host's work to queue them
    copy_us      one prediction to the other device, copies queued one behind the other
    spread       layers of the UNet on both devices: what each holds, what is handed on, steps
    images_s     pictures a second of batches in a row, decoded where they are drawn or on the other device meanwhile
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np

from scripts.bench.default_pipeline import PROMPT, SIZES, say, where
from sd_ort import StableDiffusionPipeline
from sd_ort.core import metrics
from sd_ort.core.files import write_text
from sd_ort.core.pipeline_folder import MODEL
from sd_ort.graphs.partition import partition_graph
from sd_ort.pipelines.device.guidance_split import GuidanceHalf, SplitGuidanceStep
from sd_ort.pipelines.device.loop import DeviceLoop

ALIKE_DB = 40.0  # PSNR of pictures that differ by rounding alone
BATCHES = 8  # of a measurement of images a second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("presets", nargs="+", choices=["demo", *SIZES])
    parser.add_argument("--provider", default="cuda")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("results/two_gpus"), help="without .json and .md")
    options = parser.parse_args()
    if options.quick:
        right = [quick(options, preset) for preset in options.presets]
        sys.exit(not all(right))
    report: dict[str, Any] = {"when": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC", **where()}
    report["settings"] = {"provider": options.provider, "steps": options.steps, "random_weights": True}
    report["presets"], started = {}, time.perf_counter()
    for preset in options.presets:
        for found in measure(options, preset):
            report["presets"].setdefault(preset, {}).update(found)
            say(f"{preset}, after {time.perf_counter() - started:.0f} s: {json.dumps(found)}")
            write_text(options.out.with_suffix(".json"), json.dumps(report, indent=1) + "\n")
            write_text(options.out.with_suffix(".md"), table(report))


def opened(options: argparse.Namespace, preset: str) -> Any:
    return StableDiffusionPipeline.from_pretrained(
        options.work / preset / "ours", options.provider, split_guidance=(0, 1), decode_on=1
    )


def request(options: argparse.Namespace, preset: str, **more: Any) -> dict[str, Any]:
    side = SIZES.get(preset)
    common = {"num_inference_steps": options.steps, "guidance_scale": 3.0, "height": side, "width": side}
    return {"prompt": PROMPT, **common, "generator": 0, "progress": False, **more}


def quick(options: argparse.Namespace, preset: str) -> bool:
    """Draw on one device and twice on two, with one step and with several, over which rounding grows where weights are
    random. Returns whether the first pictures are alike."""
    pipeline = opened(options, preset)
    say(f"{preset}: opened on two devices")
    split = pipeline.loop
    alone, right = DeviceLoop(pipeline.models), []
    for steps in (1, 4, options.steps):
        asked = request(options, preset, num_inference_steps=steps)
        pipeline.loop = alone
        one = np.asarray(pipeline(**asked).images[0])
        pipeline.loop = split
        two, again = (np.asarray(pipeline(**asked).images[0]) for _ in range(2))
        alike, same = metrics.psnr(two, one), np.array_equal(two, again)
        say(
            f"{preset}, {steps} steps: split against one device {alike:.1f} dB, split twice the same bytes: {same}; "
            f"deviation {one.std():.1f}; {milliseconds(alone):.2f} and {milliseconds(split):.2f} ms a step"
        )
        right.append(same and alike > ALIKE_DB and one.std() > 5)
    say(f"{preset}: UNet {type(pipeline.unet).__name__}, {type(pipeline.models.partner['unet']).__name__}")
    return right[0] and spread_alike(options, preset, one)


def spread_alike(options: argparse.Namespace, preset: str, one: np.ndarray) -> bool:
    """Draw with a UNet whose layers are on two devices. Returns whether it is the picture `one`, of all steps."""
    pipeline = StableDiffusionPipeline.from_pretrained(
        options.work / preset / "ours", options.provider, unet_on=(0, 1), device_loop=True
    )
    spread, again = (np.asarray(pipeline(**request(options, preset)).images[0]) for _ in range(2))
    alike, same = metrics.psnr(spread, one), np.array_equal(spread, again)
    kinds = ", ".join(type(link.model).__name__ for link in pipeline.unet.links)
    say(f"{preset}: layers on two devices {alike:.1f} dB, twice the same bytes: {same}; {kinds}")
    return same and alike > ALIKE_DB


def milliseconds(loop: DeviceLoop) -> float:
    """A step of its last picture."""
    return 1e3 * float(loop.step_seconds or 0)


def measure(options: argparse.Namespace, preset: str) -> Iterator[dict[str, Any]]:
    """The measurements of a preset, as they come."""
    pipeline = opened(options, preset)
    yield guidance(pipeline, options, preset)
    yield {"overlap": overlap(pipeline, options, preset)}
    del pipeline
    yield {"spread": spread(options, preset)}


# --- Layers on two devices ------------------------------------------------------------------------------------------


def spread(options: argparse.Namespace, preset: str) -> dict[str, Any]:
    """A UNet whose layers are spread over two devices: what each holds, and its steps."""
    folder = options.work / preset / "ours"
    pipeline = StableDiffusionPipeline.from_pretrained(folder, options.provider, unet_on=(0, 1), device_loop=True)
    steps = []
    for _ in range(2 + options.rounds):
        pipeline(**request(options, preset))
        steps.append(milliseconds(pipeline.loop))
    chain = newest(pipeline.loop).unet
    return {
        "weights_MB": [part.bytes / 1e6 for part in partition_graph(folder / "unet" / MODEL, 2)],
        "handed_on_MB": [sum(copy.size for copy in copies) / 1e6 for copies in chain.copies[1:]],
        "step_ms": median(steps[2:]),
    }


# --- Guidance -------------------------------------------------------------------------------------------------------


def guidance(pipeline: Any, options: argparse.Namespace, preset: str) -> dict[str, Any]:
    """Steps and whole pictures of one at a time, on one device and on two."""
    elsewhere, pipeline.models.elsewhere = pipeline.models.elsewhere, {}
    loops: dict[str, DeviceLoop] = {"one": DeviceLoop(pipeline.models), "two": pipeline.loop}
    pictures: dict[str, list[np.ndarray]] = {name: [] for name in loops}
    steps: dict[str, list[float]] = {name: [] for name in loops}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(2 + options.rounds):
        for name, loop in loops.items():
            pipeline.loop = loop
            started = time.perf_counter()
            pictures[name].append(np.asarray(pipeline(**request(options, preset)).images[0]))
            seconds[name].append(time.perf_counter() - started)
            steps[name].append(milliseconds(loop))
    step_ms = {name: median(values[2:]) for name, values in steps.items()}
    image_s = {name: median(values[2:]) for name, values in seconds.items()}
    found = {
        "psnr_db": metrics.psnr(pictures["two"][-1], pictures["one"][-1]),
        "two_devices_same_bytes_each_time": all(np.array_equal(p, pictures["two"][0]) for p in pictures["two"]),
        "deviation_of_the_picture": float(pictures["one"][0].std()),
        "captured": type(pipeline.unet).__name__ == "GpuGraphModel",
        "step_ms": step_ms,
        "step_speedup": median(a / b for a, b in zip(steps["one"][2:], steps["two"][2:], strict=True)),
        "image_s": image_s,
        "image_speedup": median(a / b for a, b in zip(seconds["one"][2:], seconds["two"][2:], strict=True)),
        "unet_ms": unets(loops),
        "exchange_us": 1e6 * exchange(loops["two"]),
        "copy_us": 1e6 * copies(loops["two"]),
    }
    pipeline.models.elsewhere = elsewhere
    return found


def unets(loops: dict[str, DeviceLoop]) -> dict[str, float]:
    """Milliseconds of a call of the UNet, both rows on one device, and a row on either."""
    named = {"both rows": loops["one"], "negative row": loops["two"], "positive row": loops["two"].other}  # type: ignore[attr-defined]
    found = {}
    for name, loop in named.items():
        buffers = newest(loop)
        with loop.models.lock:
            found[name] = 1e3 * on_device(loop, lambda buffers=buffers: buffers.unet.run(False), 20)  # type: ignore[misc]
    return found


def newest(loop: DeviceLoop) -> Any:
    return next(reversed(loop.buffer_cache.values()))


def on_device(loop: DeviceLoop, run: Callable[[], object], count: int) -> float:
    """Seconds of one of `count` runs, queued one behind the other; on a GPU by its own events."""
    run()
    stream = loop.models.stream
    if stream is None:
        started = time.perf_counter()
        for _ in range(count):
            run()
        return (time.perf_counter() - started) / count
    stream.use()
    stream.reserve(2)
    stream.record(0)
    for _ in range(count):
        run()
    stream.use()
    stream.record(1)
    stream.wait(1)
    return stream.seconds(0, 1) / count


class Nothing:
    def run(self, wait: bool = True) -> None:
        pass


def exchange(loop: Any) -> float:
    """Return the seconds of a step without the U-Net and the scheduler: the exchange alone."""
    sides = []
    for part, events in zip((loop, loop.other), loop.events, strict=True):
        schedule = newest(part).schedule
        values = SimpleNamespace(step=Nothing(), noise=schedule.noise, received=schedule.received)
        buffers: Any = SimpleNamespace(stages=[Nothing(), Nothing()], schedule=values)
        sides.append(GuidanceHalf(buffers, events))
    step = SplitGuidanceStep(sides, None if loop.models.stream is not None else loop.pool)
    with loop.models.lock:
        return on_device(loop, lambda: step.run(False), 300)


def copies(loop: Any) -> float:
    """Seconds of one prediction's way to the other device."""
    here, there = (GuidanceHalf(newest(part), part_events)
                   for part, part_events in zip((loop, loop.other), loop.events, strict=True))  # fmt: skip
    size = here.prediction_bytes
    stream, other = loop.models.stream, loop.other.models.stream

    def copy() -> None:
        if stream is None:
            there.received.update_inplace(here.noise.numpy())
        else:
            stream.send(here.noise.data_ptr(), other, there.received.data_ptr(), size)

    with loop.models.lock:
        return on_device(loop, copy, 300)


# --- Decoding meanwhile ---------------------------------------------------------------------------------------------


def overlap(pipeline: Any, options: argparse.Namespace, preset: str) -> list[dict[str, Any]]:
    """Pictures a second of batches in a row, of few steps and of many, decoded on the device that draws or the other
    one. Guidance is not split here."""
    pipeline.loop = DeviceLoop(pipeline.models)
    elsewhere = pipeline.models.elsewhere
    places: dict[str, dict[str, Any]] = {"same device": {}, "other device": elsewhere}
    rows = []
    for steps in sorted({4, options.steps}):
        batch = 1 if preset.startswith("sdxl") else 4
        count = BATCHES if options.provider != "cpu" else 2
        rates: dict[str, list[float]] = {name: [] for name in places}
        drawn: dict[str, list[np.ndarray]] = {name: [] for name in places}
        for number in range(4):
            for name, place in places.items():
                pipeline.models.elsewhere = place
                calls = [
                    request(
                        options, preset, num_inference_steps=steps, num_images_per_prompt=batch,
                        generator=list(range(i * batch, (i + 1) * batch)),
                    )
                    for i in range(count)
                ]  # fmt: skip
                started = time.perf_counter()
                outputs = list(pipeline.draw_each(calls))
                if number:
                    rates[name].append(batch * count / (time.perf_counter() - started))
                drawn[name] = [np.asarray(image) for output in outputs for image in output.images]
        rows.append(
            {
                "steps": steps,
                "batch": batch,
                "images_s": {name: median(values) for name, values in rates.items()},
                "speedup": median(b / a for a, b in zip(*rates.values(), strict=True)),
                "worst_psnr_db": min(metrics.psnr(b, a) for a, b in zip(*drawn.values(), strict=True)),
            }
        )
    pipeline.models.elsewhere = elsewhere
    return rows


# --- The page -------------------------------------------------------------------------------------------------------


def table(report: dict[str, Any]) -> str:
    """results/two_gpus.md."""
    settings, versions = report["settings"], report["versions"]
    ort = next((f"{name} {version}" for name, version in versions.items() if name.startswith("onnxruntime")), "")
    gpus = "; ".join(report["machine"]["gpus"]) or report["machine"]["cpu"]
    lines = [
        "# One pipeline on two devices",
        "",
        f"{gpus}; {ort}, commit {report['commit']}, {report['when']}. Provider {settings['provider']}, "
        f"{settings['steps']} steps, random weights; medians, in turn. By `scripts/bench/two_gpus.py`.",
        "",
        "## Guidance split",
        "",
        "| | step, 1 device | 2 devices | | whole picture | | UNet, both rows | one row | exchange | copy | PSNR |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for preset, row in report["presets"].items():
        step, image, unet = row["step_ms"], row["image_s"], row["unet_ms"]
        lines.append(
            f"| {preset} | {step['one']:.2f} ms | {step['two']:.2f} ms | {row['step_speedup']:.2f}x "
            f"| {image['one']:.3f} -> {image['two']:.3f} s | {row['image_speedup']:.2f}x | {unet['both rows']:.2f} ms "
            f"| {max(unet['negative row'], unet['positive row']):.2f} ms | at most {row['exchange_us']:.0f} us "
            f"| {row['copy_us']:.0f} us | {row['psnr_db']:.1f} dB |"
        )
    lines += [
        "",
        "The exchange is a step without UNet and scheduler, so mostly the host's time to queue it, which a real step "
        "hides; the copy is what the devices do.",
        "",
        "## Decoding on the other device meanwhile",
        "",
        "| | steps | batch | images/s, 1 device | 2 devices | | worst PSNR |",
        "|---|---|---|---|---|---|---|",
    ]
    for preset, found in report["presets"].items():
        for row in found.get("overlap", ()):
            one, two = row["images_s"].values()
            lines.append(
                f"| {preset} | {row['steps']} | {row['batch']} | {one:.2f} | {two:.2f} | {row['speedup']:.2f}x "
                f"| {row['worst_psnr_db']:.1f} dB |"
            )
    lines += [
        "",
        "## A U-Net's layers on both devices",
        "",
        "For one that does not fit: the devices take turns. Handed on: to the second device, and back.",
        "",
        "| | weights on each | handed on | step, 1 device | 2 devices |",
        "|---|---|---|---|---|",
    ]
    for preset, found in report["presets"].items():
        if "spread" not in found:
            continue
        row = found["spread"]
        weights, transfers = (
            " + ".join(f"{size:.1f}" for size in row[name]) for name in ("weights_MB", "handed_on_MB")
        )
        lines.append(
            f"| {preset} | {weights} MB | {transfers} MB | {found['step_ms']['one']:.2f} ms | {row['step_ms']:.2f} ms |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
