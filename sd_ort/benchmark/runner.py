"""Comparison of engines in one run: latency of a UNet step and of an image, memory, energy, load time, image error.

Each engine has its own process, so its memory is separate and a crash is only a failed row. All generate the same
prompts from the same seed. Rounds alternate between engines (A B C A B C ...), so a machine that slows down affects
all, and ratios are taken within a round. Measurements are saved after every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sd_ort.benchmark import engine_builds
from sd_ort.benchmark.engines.interface import BenchmarkSettings, Engine
from sd_ort.benchmark.report_file import ReportFile
from sd_ort.benchmark.worker import Worker, image_name, tuners
from sd_ort.core.errors import SdOrtError
from sd_ort.core.pipeline_folder import components
from sd_ort.core.progress import ProgressCallback, ignore_progress
from sd_ort.runtime import device_meters, tuning
from sd_ort.runtime.library import library_path
from sd_ort.runtime.providers import is_plugin, provider_named


def run(
    engines: Sequence[Engine],
    settings: BenchmarkSettings,
    out: Path,
    *,
    kind: str = "benchmark",
    notes: Sequence[str] = (),
    work: Path | None = None,
    jobs: int = 1,
    overwrite: bool = False,
    on_progress: ProgressCallback = ignore_progress,
) -> dict[str, Any]:
    """Measure engines; return the report, which is saved in `out` as <kind>.json and .csv, and one PNG per engine.

    Missing folders are built below `work`; `jobs` engines are built or loaded at once. A failing engine is a row with
    `status` "failed" and its `reason`. An interrupt marks the report `interrupted` and raises KeyboardInterrupt.
    """
    meter = device_meters.open_meter(settings.provider)
    images = [image_name(engine.label) for engine in engines]
    report = ReportFile(settings, out, [*notes, *notes_on(settings, meter)], kind, overwrite, images)
    if jobs > 1:
        report.report["notes"].append(
            f"{jobs} folders were made and {jobs} engines loaded at a time: those times suffer."
        )
    with report.saving(report.save):
        built = build_engines(engines, settings, work or out / "work", jobs, on_progress)
        for group in [[engine] for engine in built] if settings.sequential else [built]:
            measure(group, settings, report, meter, jobs, on_progress)
    return report.report


@dataclass
class BuiltEngine:
    """An engine whose folder exists, with its build time in seconds, or the reason why it could not be built."""

    engine: Engine
    seconds: float | None = None
    failure: str | None = None


def build_engines(
    engines: Sequence[Engine], settings: BenchmarkSettings, work: Path, jobs: int, on_progress: ProgressCallback
) -> list[BuiltEngine]:
    """Build missing folders of engines below `work`; engines with equal build specs share one."""

    def build(key: tuple[str, tuple[str, ...]]) -> BuiltEngine:
        raw, spec = Path(key[0]), key[1]
        engine = next(e for e in engines if (e.raw_export, e.build_spec) == key)
        on_progress(f"making {engine.label}")
        try:
            names = [settings.component] if settings.component else components(raw)
            folder, seconds = engine_builds.build_folder(spec, raw, work, names)
        except SdOrtError as error:
            return BuiltEngine(engine, failure=str(error))
        return BuiltEngine(replace(engine, directory=str(folder)), seconds)

    keys = list(dict.fromkeys((engine.raw_export, engine.build_spec) for engine in engines if engine.build_spec))
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        built = dict(zip(keys, pool.map(build, keys), strict=True))
    results = []
    for engine in engines:
        result = built.get((engine.raw_export, engine.build_spec), BuiltEngine(engine))
        results.append(replace(result, engine=replace(engine, directory=result.engine.directory)))
    return results


def measure(
    group: Sequence[BuiltEngine],
    settings: BenchmarkSettings,
    report: ReportFile,
    meter: device_meters.DeviceMeter,
    jobs: int,
    on_progress: ProgressCallback,
) -> None:
    """Run engines at one batch size after another: warm-up rounds first, one batch of each engine per round."""
    workers: list[Worker] = []

    def load(worker: Worker) -> None:
        on_progress(f"loading {worker.engine.label} ({worker.engine.directory})")
        worker.load(settings)

    with ExitStack() as running:
        # Left behind the workers: after an interrupt their processes are ended before their loading is waited for.
        pool = running.enter_context(ThreadPoolExecutor(max(1, jobs)))
        for built in group:
            worker = running.enter_context(Worker(built.engine, meter, built.failure))
            worker.loaded = {} if built.seconds is None else {"make_s": built.seconds}
            workers.append(worker)
            report.workers.append(worker)
        for _ in pool.map(load, workers):
            report.save()
        rounds = settings.warmup + settings.runs
        for batch in settings.batches:
            for index in range(rounds):
                warmup = " (warm-up)" if index < settings.warmup else ""
                on_progress(f"batch {batch}, round {index + 1} of {rounds}{warmup}")
                for worker in workers:
                    worker.run(batch, timed=not warmup)
                    report.save()
            if batch == settings.batches[0]:
                for worker in workers:
                    worker.save_image(report.out)


def notes_on(settings: BenchmarkSettings, meter: device_meters.DeviceMeter) -> list[str]:
    """Return notes for readers of the measurements: on tuning, the op library, the order of runs and energy."""
    notes = []
    if settings.tuning:
        notes.append(_tuning_note(settings.provider))
    if library_path() is None and not is_plugin(settings.provider):  # the sd-ort provider contains its kernels
        notes.append("no custom-op library was found: fused operators ran as plain ONNX functions.")
    if settings.calls > 1:
        notes.append(f"a run is {settings.calls} batches one after another; sd-ort's overlap on host and device.")
    if settings.sequential:
        notes.append("engines ran one after the other: ratios compare different moments.")
    energy = "of the whole device, idle power included" if meter.energy_J() is not None else meter.note
    return [*notes, f"energy: {energy}."]


def _tuning_note(provider: str) -> str:
    if owners := tuners(provider):
        return f"--tuning was on: {' and '.join(owners)} kernels were searched for the fastest."
    missing = provider_named(provider).ep in tuning.GPU_LIBRARIES
    advice = ", and no op library is built for it (sd-ort build-ops)" if missing else ""
    return f"--tuning changed nothing: the {provider} provider has no tunable operators{advice}."
