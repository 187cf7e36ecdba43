"""An engine in a process of its own: started, asked for batches, its memory and its end watched."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, Self

import numpy as np
import psutil

from sd_ort.benchmark.engines import interface
from sd_ort.benchmark.engines.interface import Engine, Settings
from sd_ort.core import files, metrics
from sd_ort.core.errors import SdOrtError
from sd_ort.runtime import device_meters, tuning
from sd_ort.runtime.library import library_path
from sd_ort.runtime.providers import provider_named


@dataclass
class Measured:
    """What was measured of one engine at one batch size, one entry a counted round; memory from the warm-up on, in MB.

    Device memory is what the engine's process held of it.
    """

    batch: int
    image_s: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    energy_J: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    device_memory: list[float] = field(default_factory=list)
    first_run_s: float | None = None
    size: tuple[int, int] = (0, 0)
    images: np.ndarray | None = None
    output: np.ndarray | None = None
    failure: str | None = None


class Worker:
    """An engine in a process of its own, and what was measured of it."""

    def __init__(self, engine: Engine, meter: device_meters.Meter, failure: str | None = None) -> None:
        """Start the process; nothing is loaded yet. `failure`: why there is nothing to load."""
        self.engine = engine
        self.meter = meter
        self.pool = ProcessPoolExecutor(1, get_context("spawn"), initializer=interface.start_process)
        self.process = psutil.Process(self.pool.submit(os.getpid).result())
        self.loaded: dict[str, Any] = {}
        self.failure = failure
        self.dead = False
        self.cases: dict[int, Measured] = {}

    def load(self, settings: Settings) -> None:
        """Open the engine; a failure becomes the row's reason."""
        if self.failure is None:
            try:
                loaded, _ = self.call(interface.load, self.engine, settings)
                self.loaded = {**self.loaded, **loaded}
            except SdOrtError as error:
                self.failure = str(error)
        self.cases = {batch: Measured(batch, failure=self.failure) for batch in settings.batches}

    def draw(self, batch: int, *, counted: bool) -> None:
        """Run one batch, unless this size or the engine has failed; a warm-up leaves only its memory and image."""
        case = self.cases[batch]
        if case.failure or self.dead:
            case.failure = case.failure or self.failure
            return
        try:
            result, watch = self.call(interface.draw_batch, batch)
        except SdOrtError as error:
            case.failure = str(error)
            return
        case.images, case.output, case.size = result["images"], result["output"], result["size"]
        case.memory.append(result["memory_MB"])
        if watch.peak:
            case.device_memory.append(watch.peak)
        if case.first_run_s is None:
            case.first_run_s = result["seconds"]
        if counted:
            case.step_ms.append(1e3 * median(result["steps"]))
            if case.images is not None:
                case.image_s.append(result["seconds"] / len(case.images))
            if watch.joules:  # 0: the counter, which is read every 0.1 s or so, did not move in this round
                case.energy_J.append(watch.joules / (batch if case.images is not None else len(result["steps"])))

    def call(
        self, function: Callable[..., dict[str, Any]], *arguments: Any
    ) -> tuple[dict[str, Any], device_meters.Watch]:
        """Run a function in the process, the device watched meanwhile. Raises SdOrtError when it fails or is ended."""
        with device_meters.watching(self.meter, self.process.pid) as watch:
            try:
                result = self.pool.submit(function, *arguments).result()
            except BrokenProcessPool:
                self.dead = True
                self.failure = self.failure or "its process was ended by the system: most likely it ran out of memory"
                raise SdOrtError(self.failure) from None
        return result, watch

    def row(self, case: Measured, baseline: Measured | None, settings: Settings) -> dict[str, Any]:
        """One row of the report. Speed-ups, PSNR and error are relative to `baseline`, None while nothing has run.

        `step_ms` is one call of the UNet (or component) for the whole batch, guidance included; `image_s` is the time
        of a batch over its images. There is no PSNR between images of different sizes.
        """
        row = {**asdict(self.engine), "batch": case.batch, "status": "failed" if case.failure else "ok", **self.loaded}
        if case.failure:
            row["reason"] = case.failure
        row |= memory_of("", case.memory) | memory_of("device_", case.device_memory)
        if case.memory:
            row["peak_memory_MB"] = max([*case.memory, self.loaded["load_memory_MB"]])
        if not case.step_ms:
            return row
        row["height"], row["width"] = case.size
        row["first_run_s"] = case.first_run_s
        for name, values in (("image_s", case.image_s), ("step_ms", case.step_ms), ("energy_J", case.energy_J)):
            if values:
                row[name] = metrics.summary(values)
        if settings.tuning and is_tuned(self.engine, settings.provider) and case.image_s:
            row["tuning_s"] = max(0.0, (case.first_run_s or 0) - case.batch * median(case.image_s))
        if baseline is not None and baseline.step_ms:
            row["step_speedup"] = speedup(case.step_ms, baseline.step_ms)
            if case.image_s and baseline.image_s:
                row["image_speedup"] = speedup(case.image_s, baseline.image_s)
            row |= difference(case, baseline)
        return row

    def save_image(self, out: Path) -> None:
        """Write the first image drawn as `<label>.png`."""
        from PIL import Image

        images = next((case.images for case in self.cases.values() if case.images is not None), None)
        if images is not None:
            buffer = io.BytesIO()
            Image.fromarray(images[0]).save(buffer, "PNG")
            files.write_bytes(out / image_name(self.engine.label), buffer.getvalue())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the process: at once when something else than an engine's failure, such as Ctrl-C, ended the block."""
        if kind is not None and not issubclass(kind, SdOrtError):
            self.kill()
        self.pool.shutdown()

    def kill(self) -> None:
        """End the process, in the middle of a run too."""
        self.failure = self.failure or "the run was interrupted before it began"
        with contextlib.suppress(psutil.NoSuchProcess):
            self.process.kill()


def image_name(label: str) -> str:
    """File name of an engine's picture."""
    return "".join(c if c.isalnum() or c in ".+" else "-" for c in label) + ".png"


def memory_of(prefix: str, values: Sequence[float]) -> dict[str, float]:
    """First and second run's peak memory, as ONNX Runtime's benchmark reports it, and the largest."""
    if not values:
        return {}
    first, second, peak = values[0], values[min(1, len(values) - 1)], max(values)
    names = ("first_run_memory_MB", "second_run_memory_MB", "peak_memory_MB")
    return {prefix + name: value for name, value in zip(names, (first, second, peak), strict=True)}


def difference(case: Measured, baseline: Measured) -> dict[str, Any]:
    """PSNR in dB of images, relative error (L2) of a component's output; None where it holds NaN or infinity."""
    if case.images is not None and baseline.images is not None and case.images.shape == baseline.images.shape:
        return {"psnr_db": median(map(metrics.psnr, case.images, baseline.images))}
    if case.output is not None and baseline.output is not None and case.output.shape == baseline.output.shape:
        error = metrics.relative_l2_error(case.output, baseline.output)
        return {"error": error if np.isfinite(error) else None}
    return {}


def speedup(times: Sequence[float], baseline: Sequence[float]) -> dict[str, Any]:
    """How often faster than the baseline: `of_medians`, the two medians' ratio, and the summary of the ratios of each
    round, in which both ran. Where all rounds were measured `of_medians` lies within that spread."""
    paired = metrics.summary([base / own for base, own in zip(baseline, times, strict=False)])
    return {"of_medians": median(baseline) / median(times), **paired}


def is_tuned(engine: Engine, provider: str) -> bool:
    """Whether --tuning means something to an engine."""
    return engine.engine == "onnxruntime" and bool(tuners(provider, library=engine.library))


def tuners(provider: str, *, library: bool = True) -> list[str]:
    """What --tuning turns on: the provider's own search for its fastest kernels, that of the op library, or nothing."""
    entry = provider_named(provider)
    found = [f"the {provider} provider's"] if entry.tuning else []
    if library and tuning.gpu_library(provider, library_path()) is not None:
        found.append("the op library's")
    return found
