"""One image on two GPUs: guidance split between them, and decoding on one while the other samples.

`measure` opens a folder on two devices and compares, in one process and in turn, on the same sessions. On a CPU the
devices are two groups of threads: a dry run. `scale_gpus.py --stages split` runs it.

    step_ms      one step of an image on the device: UNet, guidance, scheduler and, on two devices, the exchange
    unet_ms      UNet calls in a row: both rows of guidance on one device, and one row on each
    exchange_us  a step without UNet and scheduler: the exchange alone, mostly the host's time to queue it
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np

from scripts.bench import throughput_model
from sd_ort import StableDiffusionPipeline
from sd_ort.core import metrics
from sd_ort.pipelines.device.guidance_split import GuidanceHalf, SplitGuidanceStep
from sd_ort.pipelines.device.loop import DeviceLoop

WARM_UP = 3  # images of each kind that do not count: the second one of a size is captured
BATCHES = 6


def measure(folder: Path, provider: str, arguments: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """Return the measurements of a folder. `arguments`: of each call; `rounds`: images of each kind."""
    pipeline = StableDiffusionPipeline.from_pretrained(folder, provider, split_guidance=(0, 1), decode_on=1)
    return {**guidance(pipeline, arguments, rounds), "decoding": decoding(pipeline, arguments)}


def guidance(pipeline: Any, arguments: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """Steps and images, one at a time, on one device and on two."""
    placed, pipeline.models.placement.placed = pipeline.models.placement.placed, {}
    loops: dict[str, Any] = {"one": DeviceLoop(pipeline.models), "two": pipeline.loop}
    images: dict[str, list[np.ndarray]] = {name: [] for name in loops}
    steps: dict[str, list[float]] = {name: [] for name in loops}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(WARM_UP + rounds):
        for name, loop in loops.items():
            pipeline.loop = loop
            start = time.perf_counter()
            images[name].append(np.asarray(pipeline(**arguments).images[0]))
            seconds[name].append(time.perf_counter() - start)
            steps[name].append(float(loop.step_seconds))
    steps, seconds = ({name: times[WARM_UP:] for name, times in table.items()} for table in (steps, seconds))
    report = {
        "psnr_db": metrics.psnr(images["two"][-1], images["one"][-1]),
        "two_devices_same_bytes_each_time": all(np.array_equal(image, images["two"][0]) for image in images["two"]),
        "image_std": float(images["one"][0].std()),
        "captured": type(pipeline.unet).__name__ == "GpuGraphModel",
        "step_ms": {name: 1e3 * median(times) for name, times in steps.items()},
        "step_speedup": median(one / two for one, two in zip(steps["one"], steps["two"], strict=True)),
        "image_s": {name: median(times) for name, times in seconds.items()},
        "image_speedup": median(one / two for one, two in zip(seconds["one"], seconds["two"], strict=True)),
        "unet_ms": unets(loops),
        "exchange_us": 1e6 * exchange(loops["two"]),
    }
    pipeline.models.placement.placed = placed
    pipeline.loop = loops["one"]
    return report


def newest(loop: DeviceLoop) -> Any:
    """Return the buffers of the last image."""
    return next(reversed(loop.buffer_cache.values()))


def unets(loops: Mapping[str, Any]) -> dict[str, float]:
    """Return milliseconds of a UNet call: both rows on one device, and a row on either."""
    named = {"both rows": loops["one"], "negative row": loops["two"], "positive row": loops["two"].other}
    times = {}
    for name, loop in named.items():
        unet = newest(loop).unet
        with loop.models.lock:
            times[name] = 1e3 * device_seconds(loop, functools.partial(unet.run, False), 20)
    return times


def exchange(loop: Any) -> float:
    """Return the seconds of a step without the UNet and the scheduler: the exchange alone."""
    nothing = SimpleNamespace(run=lambda wait=True: None)
    sides = []
    for part, events in zip((loop, loop.other), loop.events, strict=True):
        schedule = newest(part).schedule
        values = SimpleNamespace(step=nothing, noise=schedule.noise, received=schedule.received)
        buffers: Any = SimpleNamespace(stages=[nothing, nothing], schedule=values)
        sides.append(GuidanceHalf(buffers, events))
    step = SplitGuidanceStep(sides, None if loop.models.stream is not None else loop.pool)
    with loop.models.lock:
        return device_seconds(loop, lambda: step.run(False), 300)


def device_seconds(loop: DeviceLoop, run: Callable[[], object], count: int) -> float:
    """Return the seconds of one of `count` runs that are queued behind each other; on a GPU by its own events."""
    run()
    stream = loop.models.stream
    if stream is None:
        start = time.perf_counter()
        for _ in range(count):
            run()
        return (time.perf_counter() - start) / count
    stream.set_device()
    stream.reserve(2)
    stream.record(0)
    for _ in range(count):
        run()
    stream.set_device()
    stream.record(1)
    stream.wait(1)
    return stream.seconds(0, 1) / count


def decoding(pipeline: Any, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Images a second of several calls, of 4 steps and of all, decoded on the device that samples or on the other."""
    placed = pipeline.models.placement.placed
    places: dict[str, Mapping[str, Any]] = {"same device": {}, "other device": placed}
    rows = []
    for steps in sorted({4, int(arguments["num_inference_steps"])}):
        calls = [{**arguments, "num_inference_steps": steps, "generator": seed} for seed in range(BATCHES)]
        rates: dict[str, list[float]] = {name: [] for name in places}
        images: dict[str, list[np.ndarray]] = {}
        for number in range(3):
            for name, placement in places.items():
                pipeline.models.placement.placed = placement
                start = time.perf_counter()
                outputs = list(pipeline.draw_each(calls))
                if number:
                    rates[name].append(len(calls) / (time.perf_counter() - start))
                images[name] = [np.asarray(output.images[0]) for output in outputs]
        pipeline.models.placement.placed = {}
        start = time.perf_counter()
        for call in calls:
            pipeline(**{**call, "output_type": "latent"})
        latents = (time.perf_counter() - start) / len(calls)
        one, two = (median(values) for values in rates.values())
        rows.append({
            "steps": steps, "images_s": {name: median(values) for name, values in rates.items()}, "speedup": two / one,
            "model_images_s": 1 / throughput_model.overlapped_decoding(1 / one, latents), "latents_s": latents,
            "worst_psnr_db": min(metrics.psnr(b, a) for a, b in zip(*images.values(), strict=True)),
        })  # fmt: skip
    pipeline.models.placement.placed = placed
    return rows
