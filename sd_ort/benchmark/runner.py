"""Engines side by side in one run: latency a UNet step and an image, memory, energy, time to load, the image's error.

Every engine lives in a process of its own, so that its memory is its own and its crash is only a row in the table. All
draw the same prompts from the same seed. Runs go in turn (A B C A B C ...), so that a machine that slows down slows
all of them, and ratios are taken within a round. What was measured is on disk after every run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sd_ort.benchmark import engine_builds
from sd_ort.benchmark.engines.interface import Engine, Settings
from sd_ort.benchmark.report_file import Record
from sd_ort.benchmark.worker import Worker, tuners
from sd_ort.core.errors import SdOrtError
from sd_ort.core.pipeline_folder import components
from sd_ort.runtime import device_meters, tuning
from sd_ort.runtime.library import library_path
from sd_ort.runtime.providers import is_plugin, provider_named


def run(
    engines: Sequence[Engine],
    settings: Settings,
    out: Path,
    *,
    kind: str = "benchmark",
    notes: Sequence[str] = (),
    work: Path | None = None,
    jobs: int = 1,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure the engines; the report is returned, and kept in `out` as <kind>.json, .csv and one PNG an engine.

    Folders that engines still need are made below `work`, and engines loaded, `jobs` at a time. An engine that fails is
    a row with `status` "failed" and its `reason`. On an interrupt the report is marked `interrupted`, and
    KeyboardInterrupt goes on.
    """
    meter = device_meters.open_meter(settings.provider)
    record = Record(settings, out, [*notes, *notes_on(settings, meter)], kind)
    if jobs > 1:
        record.report["notes"].append(
            f"{jobs} folders were made and {jobs} engines loaded at a time: those times suffer."
        )
    with record.kept(record.save):
        prepared = prepare(engines, settings, work or out / "work", jobs, say)
        for group in [[item] for item in prepared] if settings.sequential else [prepared]:
            measure(group, settings, record, meter, jobs, say)
    return record.report


@dataclass
class Prepared:
    """An engine whose folder exists, with the seconds it took to make, or the reason why it does not."""

    engine: Engine
    seconds: float | None = None
    failure: str | None = None


def prepare(
    engines: Sequence[Engine], settings: Settings, work: Path, jobs: int, say: Callable[[str], None]
) -> list[Prepared]:
    """Make the folders that engines need; engines of the same recipe share one."""

    def make(key: tuple[str, tuple[str, ...]]) -> Prepared:
        raw, recipe = Path(key[0]), key[1]
        engine = next(e for e in engines if (e.raw, e.make) == key)
        say(f"making {engine.label}")
        try:
            wanted = [settings.component] if settings.component else components(raw)
            folder, seconds = engine_builds.make(recipe, raw, work, wanted)
        except SdOrtError as error:
            return Prepared(engine, failure=str(error))
        return Prepared(replace(engine, directory=str(folder)), seconds)

    keys = list(dict.fromkeys((engine.raw, engine.make) for engine in engines if engine.make))
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        made = dict(zip(keys, pool.map(make, keys), strict=True))
    results = []
    for engine in engines:
        folder = made.get((engine.raw, engine.make), Prepared(engine))
        results.append(replace(folder, engine=replace(engine, directory=folder.engine.directory)))
    return results


def measure(
    group: Sequence[Prepared],
    settings: Settings,
    record: Record,
    meter: device_meters.Meter,
    jobs: int,
    say: Callable[[str], None],
) -> None:
    """Run engines in turn, one batch size after another: one batch each, round after round, warm-up rounds first."""
    workers: list[Worker] = []

    def load(worker: Worker) -> None:
        say(f"loading {worker.engine.label} ({worker.engine.directory})")
        worker.load(settings)

    with ExitStack() as running:
        for item in group:
            workers.append(running.enter_context(Worker(item.engine, meter, item.failure)))
            workers[-1].loaded = {} if item.seconds is None else {"make_s": item.seconds}
            record.workers.append(workers[-1])
        with ThreadPoolExecutor(max(1, jobs)) as pool:
            for _ in pool.map(load, workers):
                record.save()
        rounds = settings.warmup + settings.runs
        for batch in settings.batches:
            for index in range(rounds):
                say(f"batch {batch}, round {index + 1} of {rounds}{' (warm-up)' if index < settings.warmup else ''}")
                for worker in workers:
                    worker.draw(batch, counted=index >= settings.warmup)
                    record.save()
            if batch == settings.batches[0]:
                for worker in workers:
                    worker.save_image(record.out)


def notes_on(settings: Settings, meter: device_meters.Meter) -> list[str]:
    """What a reader of the numbers has to know."""
    notes = []
    if settings.tuning:
        notes.append(_tuning_note(settings.provider))
    if library_path() is None and not is_plugin(settings.provider):  # ours brings its kernels along
        notes.append("no custom-op library was found: fused operators ran as plain ONNX functions.")
    if settings.sequential:
        notes.append("engines ran one after the other: ratios compare different moments.")
    energy = "of the whole device, idle power included" if meter.energy_J() is not None else meter.note
    notes.append(f"energy: {energy}.")
    return notes


def _tuning_note(provider: str) -> str:
    if found := tuners(provider):
        return f"--tuning was on: {' and '.join(found)} kernels were searched for the fastest."
    missing = provider_named(provider).ep in tuning.GPU_LIBRARIES
    advice = ", and no op library is built for it (sd-ort build-ops)" if missing else ""
    return f"--tuning changed nothing: the {provider} provider has no tunable operators{advice}."
