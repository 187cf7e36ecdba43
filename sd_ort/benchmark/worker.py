"""Measures one engine in a process of its own."""

from __future__ import annotations

import contextlib
import io
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from statistics import median
from typing import Any, Self

import numpy as np
import psutil

from sd_ort.benchmark.engines import interface
from sd_ort.benchmark.engines.interface import BenchmarkSettings, Engine
from sd_ort.core import metrics
from sd_ort.core.errors import SdOrtError
from sd_ort.core.ownership import SharedFolder
from sd_ort.runtime import device_meters, tuning
from sd_ort.runtime.library import library_path
from sd_ort.runtime.providers import provider_named

KILLED = 9  # SIGKILL, which Windows does not have


@dataclass
class EngineMeasurements:
    """Measurements of one engine at one batch size: one entry per timed round; memory in MB, also of warm-up rounds.

    Device memory is that of the engine's process.
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
    """An engine in its own process, with its measurements by batch size."""

    def __init__(self, engine: Engine, meter: device_meters.DeviceMeter, failure: str | None = None) -> None:
        """Start the process without loading the engine. `failure`: why it cannot be loaded."""
        self.engine, self.meter, self.failure = engine, meter, failure
        self.pool = ProcessPoolExecutor(1, get_context("spawn"), initializer=interface.start_process)
        self.process = psutil.Process(self.pool.submit(os.getpid).result())
        (self.child,) = self.pool._processes.values()
        self.loaded: dict[str, Any] = {}
        self.dead = False
        self.measurements: dict[int, EngineMeasurements] = {}

    def load(self, settings: BenchmarkSettings) -> None:
        """Load the engine; a failure becomes the reason in its rows."""
        if self.failure is None:
            try:
                loaded, _ = self.call(interface.load, self.engine, settings)
                self.loaded |= loaded
            except SdOrtError as error:
                self.failure = str(error)
        self.measurements = {batch: EngineMeasurements(batch, failure=self.failure) for batch in settings.batches}

    def run(self, batch: int, *, timed: bool) -> None:
        """Run batches of one size unless it or the engine failed before; warm-ups record only memory and images."""
        measured = self.measurements[batch]
        if measured.failure or self.dead:
            measured.failure = measured.failure or self.failure
            return
        try:
            result, usage = self.call(interface.run_batch, batch)
        except SdOrtError as error:
            measured.failure = str(error)
            return
        measured.images, measured.output, measured.size = result["images"], result["output"], result["size"]
        measured.memory.append(result["memory_MB"])
        if usage.peak:
            measured.device_memory.append(usage.peak)
        if measured.first_run_s is None:
            measured.first_run_s = result["seconds"]
        if timed:
            measured.step_ms.append(1e3 * median(result["steps"]))
            if measured.images is not None:
                measured.image_s.append(result["seconds"] / len(measured.images))
            if usage.joules:  # 0 if the counter, which changes every 0.1 s or so, did not change in this round
                count = len(result["steps"]) if measured.images is None else len(measured.images)
                measured.energy_J.append(usage.joules / count)

    def call(
        self, function: Callable[..., dict[str, Any]], *arguments: Any
    ) -> tuple[dict[str, Any], device_meters.DeviceUsage]:
        """Run a function in the process and measure its device usage. Raises SdOrtError if it fails or is killed."""
        with device_meters.watching(self.meter, self.process.pid) as usage:
            try:
                result = self.pool.submit(function, *arguments).result()
            except BrokenProcessPool:
                self.dead = True
                self.child.join(10)
                self.failure = self.failure or _death(self.child.exitcode)
                raise SdOrtError(self.failure) from None
        return result, usage

    def row(
        self, measured: EngineMeasurements, baseline: EngineMeasurements | None, settings: BenchmarkSettings
    ) -> dict[str, Any]:
        """Return one row of the report; speed-ups, PSNR and error are relative to `baseline`, if there is one.

        `step_ms` is one call of the UNet (or component) for the batch, guidance included; `image_s` is the time of a
        batch divided by its images. Images of different sizes have no PSNR.
        """
        status = "failed" if measured.failure else "ok"
        row = {**asdict(self.engine), "batch": measured.batch, "status": status, **self.loaded}
        if measured.failure:
            row["reason"] = measured.failure
        row |= memory_columns("", measured.memory) | memory_columns("device_", measured.device_memory)
        if measured.memory:
            row["peak_memory_MB"] = max([*measured.memory, self.loaded["load_memory_MB"]])
        if not measured.step_ms:
            return row
        row["height"], row["width"] = measured.size
        row["first_run_s"] = measured.first_run_s
        for name in ("image_s", "step_ms", "energy_J"):
            if values := getattr(measured, name):
                row[name] = metrics.summary(values)
        if settings.tuning and is_tuned(self.engine, settings.provider) and measured.image_s:
            images = measured.batch * settings.calls
            row["tuning_s"] = max(0.0, (measured.first_run_s or 0) - images * median(measured.image_s))
        if baseline is not None and baseline.step_ms:
            row["step_speedup"] = speedup(measured.step_ms, baseline.step_ms)
            if measured.image_s and baseline.image_s:
                row["image_speedup"] = speedup(measured.image_s, baseline.image_s)
            row |= output_error(measured, baseline)
        return row

    def save_image(self, out: SharedFolder) -> None:
        """Write the first image as `<label>.png`."""
        from PIL import Image

        images = next((m.images for m in self.measurements.values() if m.images is not None), None)
        if images is not None:
            buffer = io.BytesIO()
            Image.fromarray(images[0]).save(buffer, "PNG")
            out.write(image_name(self.engine.label), buffer.getvalue())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the process, immediately after any exception but an engine's failure (such as Ctrl-C)."""
        if kind is not None and not issubclass(kind, SdOrtError):
            for measured in self.measurements.values():
                if not measured.step_ms:
                    measured.failure = measured.failure or "the run was interrupted before it was timed"
            with contextlib.suppress(psutil.NoSuchProcess):
                self.process.kill()
        self.pool.shutdown()


def _death(exit_code: int | None) -> str:
    """Return why a process ended that did not answer, from multiprocessing's exit code: negative for a signal."""
    if exit_code is None or exit_code >= 0 or exit_code == -KILLED:
        return "its process was ended by the system: most likely it ran out of memory"
    name = signal.Signals(-exit_code).name
    changed = ": a file of its folder was truncated meanwhile" if name == "SIGBUS" else ""
    return f"its process was ended by {name}{changed}"


def image_name(label: str) -> str:
    """Return the file name of an engine's image."""
    return "".join(c if c.isalnum() or c in ".+" else "-" for c in label) + ".png"


def memory_columns(prefix: str, values: Sequence[float]) -> dict[str, float]:
    """Return the peak memory of the first run, of the second (as ONNX Runtime's benchmark reports), and of all."""
    if not values:
        return {}
    first, second, peak = values[0], values[min(1, len(values) - 1)], max(values)
    names = ("first_run_memory_MB", "second_run_memory_MB", "peak_memory_MB")
    return {prefix + name: value for name, value in zip(names, (first, second, peak), strict=True)}


def output_error(measured: EngineMeasurements, baseline: EngineMeasurements) -> dict[str, Any]:
    """Return the PSNR of images in dB, or the relative L2 error of a component's output (None: not finite)."""
    if measured.images is not None and baseline.images is not None and measured.images.shape == baseline.images.shape:
        return {"psnr_db": median(map(metrics.psnr, measured.images, baseline.images))}
    if measured.output is not None and baseline.output is not None and measured.output.shape == baseline.output.shape:
        error = metrics.relative_l2_error(measured.output, baseline.output)
        return {"error": error if np.isfinite(error) else None}
    return {}


def speedup(times: Sequence[float], baseline: Sequence[float]) -> dict[str, Any]:
    """Return the ratio of the medians (`of_medians`) and the summary of the ratios of rounds in which both ran.

    If all rounds were measured, `of_medians` lies within the spread of the ratios.
    """
    ratios = metrics.summary([base / own for base, own in zip(baseline, times, strict=False)])
    return {"of_medians": median(baseline) / median(times), **ratios}


def is_tuned(engine: Engine, provider: str) -> bool:
    """Return whether --tuning affects an engine."""
    return engine.engine == "onnxruntime" and bool(tuners(provider, library=engine.library))


def tuners(provider: str, *, library: bool = True) -> list[str]:
    """Return the owners of the kernels that --tuning searches: the provider, the op library, or none."""
    owners = [f"the {provider} provider's"] if provider_named(provider).tuning else []
    if library and tuning.gpu_library(provider, library_path()) is not None:
        owners.append("the op library's")
    return owners
