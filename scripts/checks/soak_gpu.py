#!/usr/bin/env python3
"""Soak test of a pipeline folder on one provider: changing sizes, batches, seeds, threads, tasks, LoRAs and pipelines.

    soak_gpu.py FOLDER --provider sdcuda [--lora FILE ...] [--controlnet FOLDER] [--ip-adapter FOLDER] [--steps 4]
                [--scale 1.0] [--out results/soak/sdcuda.json]

Every image is compared byte for byte with the first image of the same request. Requests run one after another, again,
and then from four threads at once. After them run image to image, inpainting, ControlNet and IP-Adapter (folders that
were optimized with one), LoRA rounds (load, two scales, unload), pipelines that open while another one captures, and
pipelines that open, generate and close. Device memory, process memory and open file descriptors are read after each
stage, and device memory after each call: `device_growth` names the calls after which more was in use than ever before.
--scale shrinks the sizes for small models. The exit code is 1 if an image differs, a call fails, a run that should be
captured is not, or memory or descriptors grow when a stage runs again. For each run that was not captured, `uncaptured`
has the sessions that threads opened in the last seconds, the stacks of all threads, and the device memory in use.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from PIL import Image

from sd_ort import (
    StableDiffusionControlNetPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionPipeline,
)
from sd_ort.core.files import write_json
from sd_ort.runtime import bound_run, component_opener
from sd_ort.runtime.bound_run import failed_captures
from sd_ort.runtime.glibc_malloc import mallinfo
from sd_ort.runtime.machine import commit, machine, versions

SIZES = ((512, 512), (768, 512), (512, 768), (640, 640), (1024, 1024), (256, 256), (448, 576), (704, 512))
PROMPT = "a red circle left of a small blue square on a white background"
THREADS = 4
RECENT_S = 5.0  # sessions that were opened at most so long before a run was not captured are recorded


@dataclass(frozen=True)
class Request:
    """One call of a pipeline; `height` and `width` in pixels."""

    height: int
    width: int
    batch: int
    seed: int


@dataclass
class Soak:
    """State of one soak: the first image of each request, and the failures."""

    folder: Path
    provider: str
    steps: int
    first: dict[Any, bytes] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    stages: list[dict[str, Any]] = field(default_factory=list)
    tasks: list[str] = field(default_factory=list)
    device_growth: list[dict[str, Any]] = field(default_factory=list)
    largest_MB: int = 0  # of device memory in use after a call
    openings: list[dict[str, Any]] = field(default_factory=list)  # sessions, with begin and end, None while it opens
    uncaptured: list[dict[str, Any]] = field(default_factory=list)

    @contextmanager
    def record_failed_captures(self) -> Iterator[None]:
        """Record in `uncaptured` the runs that were not captured, with the calls of other threads."""
        opener: Any = component_opener  # which imports the function
        report, create_session = bound_run.report_failed_capture, opener.create_session

        def create(path: Path, *arguments: Any, **options: Any) -> Any:
            thread, begin = threading.current_thread().name, time.monotonic()
            row = {"session": path.parent.name, "thread": thread, "begin": begin, "end": None}
            self.openings.append(row)
            try:
                return create_session(path, *arguments, **options)
            finally:
                row["end"] = time.monotonic()

        def failed(error: Exception) -> None:
            now, names = time.monotonic(), {each.ident: each.name for each in threading.enumerate()}
            recent = [row for row in self.openings if row["end"] is None or now - row["end"] < RECENT_S]
            stacks = {
                names.get(ident, str(ident)): [
                    f"{f.filename}:{f.lineno} {f.name}" for f in traceback.extract_stack(top)
                ]
                for ident, top in sys._current_frames().items()
            }
            row = {"reason": str(error), "stage_number": len(self.stages), "device_MB": device_megabytes()}
            openings = [
                each | {key: each[key] and round(each[key] - now, 4) for key in ("begin", "end")} for each in recent
            ]
            thread = threading.current_thread().name
            self.uncaptured.append(row | {"thread": thread, "openings": openings, "stacks": stacks})
            report(error)

        bound_run.report_failed_capture, opener.create_session = failed, create
        try:
            yield
        finally:
            bound_run.report_failed_capture, opener.create_session = report, create_session

    def watch(self, call: object) -> None:
        """Record `call` if more device memory is in use than after all calls before it."""
        used = device_megabytes() or 0
        if used > self.largest_MB:
            row = {"stage_number": len(self.stages), "call": str(call), "device_MB": used}
            self.device_growth.append(row | {"growth_MB": used - self.largest_MB})
            self.largest_MB = used

    def open(self, pipeline_class: Any = StableDiffusionPipeline, folder: Path | None = None) -> Any:
        return pipeline_class.from_pretrained(folder or self.folder, self.provider)

    def generate(self, pipeline: Any, request: Request, key: Any = None, **arguments: Any) -> None:
        """Generate the images of a request and compare them with the first ones under `key`."""
        try:
            output = pipeline(
                PROMPT, num_inference_steps=self.steps, num_images_per_prompt=request.batch,
                generator=request.seed, progress=False, **arguments,
            )  # fmt: skip
        except Exception as error:  # a soak reports every failure and goes on
            traceback.print_exc()
            self.failures.append(f"{key or request}: {type(error).__name__}: {str(error).splitlines()[0]}")
            return
        self.watch(key or request)
        data = b"".join(np.asarray(image).tobytes() for image in output.images)
        if self.first.setdefault(key or request, data) != data:
            pairs = (np.frombuffer(each, np.uint8).astype(int) for each in (self.first[key or request], data))
            largest = int(np.abs(np.subtract(*pairs)).max())
            self.failures.append(f"{key or request}: differs from its first image by up to {largest} of 255")

    def text_to_image(self, pipeline: Any, request: Request, key: Any = None) -> None:
        self.generate(pipeline, request, key=key, height=request.height, width=request.width)

    def stage(self, name: str, work: Callable[[], Any]) -> None:
        """Run `work`; record its seconds and the memory and descriptors after it."""
        before, start = len(self.failures), time.perf_counter()
        work()
        gc.collect()
        row = {"stage": name, "seconds": round(time.perf_counter() - start, 2), **usage()}
        row["failures"] = len(self.failures) - before
        self.stages.append(row)
        print(json.dumps(row), flush=True)


def usage() -> dict[str, Any]:
    """Device memory in use (MB, None without CUDA), memory of the process (MB), and open descriptors.

    `allocated_MB` is what malloc has given out; `rss_MB` also has what it retains of freed memory, by thread.
    """
    process, malloc = psutil.Process(), mallinfo()
    return {
        "device_MB": device_megabytes(),
        "allocated_MB": (malloc.uordblks + malloc.hblkhd) >> 20,
        "rss_MB": process.memory_info().rss >> 20,
        "descriptors": process.num_fds(),
    }


def device_megabytes() -> int | None:
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return (total - free) >> 20


def requests(scale: float) -> Iterator[Request]:
    for height, width in SIZES:
        for batch in (1, 2):
            for seed in (0, 1):
                yield Request(int(height * scale) // 64 * 64 or 64, int(width * scale) // 64 * 64 or 64, batch, seed)


def in_series(soak: Soak, pipeline: Any, all_requests: list[Request]) -> None:
    for request in all_requests:
        soak.text_to_image(pipeline, request)


def in_threads(soak: Soak, pipeline: Any, all_requests: list[Request]) -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda request: soak.text_to_image(pipeline, request), all_requests))


def other_tasks(soak: Soak, size: Request, controlnet: Path | None, ip_adapter: Path | None) -> None:
    """Image to image, inpainting, ControlNet and IP-Adapter in turn, twice."""
    y, x = np.mgrid[: size.height, : size.width]
    image = Image.fromarray(np.stack([x % 256, y % 256, (x + y) % 256], -1).astype(np.uint8))
    mask = Image.fromarray(np.where((x > size.width // 8) & (y > size.height // 8), 255, 0).astype(np.uint8))
    sides = {"height": size.height, "width": size.width}
    tasks: list[tuple[str, Any, dict[str, Any]]] = []
    if (soak.folder / "vae_encoder").is_dir():
        inpainting = {"image": image, "mask_image": mask, "strength": 1.0}
        image_to_image = {"image": image, "strength": max(0.8, 1 / soak.steps)}  # one step or more
        tasks.append(("image to image", soak.open(StableDiffusionImg2ImgPipeline), image_to_image))
        tasks.append(("inpainting", soak.open(StableDiffusionInpaintPipeline), inpainting))
    if controlnet:
        pipeline = soak.open(StableDiffusionControlNetPipeline, controlnet)
        tasks.append(("ControlNet", pipeline, {"image": image, **sides}))
    if ip_adapter:
        tasks.append(("IP-Adapter", soak.open(folder=ip_adapter), {"ip_adapter_image": image, **sides}))
    soak.tasks = [name for name, _, _ in tasks]
    for _ in range(2):
        for name, pipeline, arguments in tasks:
            soak.generate(pipeline, size, key=name, **arguments)


def lora_rounds(soak: Soak, pipeline: Any, files: list[Path], size: Request, rounds: int) -> dict[str, float]:
    """Load, two scales and unload, `rounds` times; returns the median seconds of each change."""
    seconds: dict[str, list[float]] = {"load": [], "scale": [], "unload": []}

    def timed(name: str, change: Callable[[], Any]) -> None:
        start = time.perf_counter()
        change()
        seconds[name].append(time.perf_counter() - start)
        soak.watch(f"LoRA {name}")

    for index in range(rounds):
        file = files[index % len(files)]
        timed("load", partial(pipeline.load_lora_weights, file, adapter_name="soak"))
        for scale in (0.7, 0.3):
            timed("scale", partial(pipeline.set_adapters, "soak", scale))
            soak.text_to_image(pipeline, size, key=("LoRA", file.name, scale))
        timed("unload", pipeline.unload_lora_weights)
        soak.text_to_image(pipeline, size)
    return {name: round(float(np.median(values)), 4) for name, values in seconds.items()}


def open_while_generating(soak: Soak, all_requests: list[Request]) -> None:
    """Open pipelines in one thread while another generates at sizes that its pipeline captures for the first time."""
    pipeline, done = soak.open(), threading.Event()

    def generate_all() -> None:
        for request in all_requests:
            soak.text_to_image(pipeline, request)
        done.set()

    thread = threading.Thread(target=generate_all)
    thread.start()
    while not done.is_set():
        soak.text_to_image(soak.open(), all_requests[0])
    thread.join()


def open_and_close(soak: Soak, size: Request, count: int) -> None:
    for _ in range(count):
        soak.text_to_image(soak.open(), size)
        gc.collect()


def growth(stages: list[dict[str, Any]], name: str, allowed: float) -> str | None:
    """Why a stage that repeats an earlier one ("again") used more of `name` than that, or None."""
    by_stage = {row["stage"]: row[name] for row in stages}
    pairs = {"sizes again": "sizes captured", "LoRAs again": "LoRAs", "pipelines again": "pipelines"}
    for later, earlier in pairs.items():
        if by_stage.get(later) is not None and by_stage[later] > by_stage[earlier] + allowed:
            return f"{name} grew from {by_stage[earlier]} to {by_stage[later]} during {later!r}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--provider", default="cpu")
    parser.add_argument("--lora", type=Path, nargs="*", default=[])
    parser.add_argument("--lora-rounds", type=int, default=20)
    parser.add_argument("--controlnet", type=Path)
    parser.add_argument("--ip-adapter", type=Path)
    parser.add_argument("--requests", type=int, help="only the first ones of 32: two batches and two seeds a size")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--pipelines", type=int, default=10, help="opened and closed, twice")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("error")
    soak, earlier = Soak(options.folder, options.provider, options.steps), len(failed_captures())
    all_requests = list(requests(options.scale))[: options.requests]
    with soak.record_failed_captures():
        changes = run_stages(soak, all_requests, options)
    limits = {"device_MB": 64, "allocated_MB": 64, "rss_MB": 512, "descriptors": 4}
    soak.failures += filter(None, (growth(soak.stages, name, allowed) for name, allowed in limits.items()))
    soak.failures += [f"a run was not captured: {reason}" for reason in failed_captures()[earlier:]]
    report = {
        "folder": options.folder.name, "provider": options.provider, "requests": len(all_requests),
        "steps": options.steps, "other_tasks": soak.tasks,
        "stages": soak.stages, "device_growth": soak.device_growth, "uncaptured": soak.uncaptured,
        "lora_seconds": changes, "failures": soak.failures, "load_average": os.getloadavg()[0],
        "machine": machine(), "versions": versions(), "commit": commit(),
    }  # fmt: skip
    if options.out:
        write_json(options.out, report)
    print(json.dumps({"lora_seconds": changes, "failures": soak.failures}, indent=1))
    return 1 if soak.failures else 0


def run_stages(soak: Soak, all_requests: list[Request], options: argparse.Namespace) -> dict[str, float]:
    """Run all stages; return the median seconds of changes of LoRAs."""
    pipeline = soak.open()
    for name in ("sizes", "sizes captured", "sizes again"):  # a size is captured when it comes for the second time
        soak.stage(name, lambda: in_series(soak, pipeline, all_requests))
    soak.stage("four threads", lambda: in_threads(soak, pipeline, all_requests))
    soak.stage("other tasks", lambda: other_tasks(soak, all_requests[0], options.controlnet, options.ip_adapter))
    changes: dict[str, float] = {}
    if options.lora:
        rounds = options.lora_rounds // 2
        for name in ("LoRAs", "LoRAs again"):
            soak.stage(name, lambda: changes.update(lora_rounds(soak, pipeline, options.lora, all_requests[0], rounds)))
    soak.stage("pipelines open while one captures", lambda: open_while_generating(soak, all_requests[::4]))
    soak.stage("pipelines", lambda: open_and_close(soak, all_requests[0], options.pipelines))
    soak.stage("pipelines again", lambda: open_and_close(soak, all_requests[0], options.pipelines))
    return changes


if __name__ == "__main__":
    sys.exit(main())
