"""Engines side by side in one run: latency a UNet step and an image, memory, energy, time to load, the image's error.

Every engine lives in a process of its own, so that its memory is its own and its crash is only a row in the table. All
draw the same prompts from the same seed. Runs go in turn (A B C A B C ...), so that a machine that slows down slows
all of them, and ratios are taken within a round. What was measured is on disk after every run.
"""

from __future__ import annotations

import contextlib
import csv
import datetime
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, Self

import numpy as np
import psutil

from sd_ort import device, engines, measure, tuning, variants
from sd_ort.engines import Engine, Settings
from sd_ort.errors import SdOrtError
from sd_ort.folder import components
from sd_ort.session import op_library, provider_named

FORMAT = 2
# Columns and units (s, MB) of onnxruntime/python/tools/transformers/models/stable_diffusion/benchmark.py.
CSV_COLUMNS = (
    "model_name",
    "directory",
    "engine",
    "version",
    "provider",
    "disable_safety_checker",
    "height",
    "width",
    "steps",
    "batch_size",
    "batch_count",
    "num_prompts",
    "average_latency",
    "median_latency",
    "first_run_memory_MB",
    "second_run_memory_MB",
    "enable_cuda_graph",
)


# --- The run --------------------------------------------------------------------------------------------------------


@dataclass
class Case:
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

    def __init__(self, engine: Engine, meter: device.Meter, failure: str | None = None) -> None:
        """Start the process; nothing is loaded yet. `failure`: why there is nothing to load."""
        self.engine = engine
        self.meter = meter
        self.pool = ProcessPoolExecutor(1, get_context("spawn"), initializer=engines.start_process)
        self.process = psutil.Process(self.pool.submit(os.getpid).result())
        self.loaded: dict[str, Any] = {}
        self.failure = failure
        self.dead = False
        self.cases: dict[int, Case] = {}

    def load(self, settings: Settings) -> None:
        """Open the engine; a failure becomes the row's reason."""
        if self.failure is None:
            try:
                loaded, _ = self.call(engines.load, self.engine, settings)
                self.loaded = {**self.loaded, **loaded}
            except SdOrtError as error:
                self.failure = str(error)
        self.cases = {batch: Case(batch, failure=self.failure) for batch in settings.batches}

    def draw(self, batch: int, *, counted: bool) -> None:
        """Run one batch, unless this size or the engine has failed; a warm-up leaves only its memory and image."""
        case = self.cases[batch]
        if case.failure or self.dead:
            case.failure = case.failure or self.failure
            return
        try:
            result, watch = self.call(engines.draw_batch, batch)
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

    def call(self, function: Callable[..., dict[str, Any]], *arguments: Any) -> tuple[dict[str, Any], device.Watch]:
        """Run a function in the process, the device watched meanwhile. Raises SdOrtError when it fails or is ended."""
        with device.watching(self.meter, self.process.pid) as watch:
            try:
                result = self.pool.submit(function, *arguments).result()
            except BrokenProcessPool:
                self.dead = True
                self.failure = self.failure or "its process was ended by the system: most likely it ran out of memory"
                raise SdOrtError(self.failure) from None
        return result, watch

    def row(self, case: Case, baseline: Case | None, settings: Settings) -> dict[str, Any]:
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
                row[name] = measure.summary(values)
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
            measure.write_bytes(out / image_name(self.engine.label), buffer.getvalue())

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


def difference(case: Case, baseline: Case) -> dict[str, Any]:
    """PSNR in dB of images, relative error (L2) of a component's output; None where it holds NaN or infinity."""
    if case.images is not None and baseline.images is not None and case.images.shape == baseline.images.shape:
        return {"psnr_db": median(map(measure.psnr, case.images, baseline.images))}
    if case.output is not None and baseline.output is not None and case.output.shape == baseline.output.shape:
        got, want = case.output.astype(np.float64), baseline.output.astype(np.float64)
        error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
        return {"error": error if np.isfinite(error) else None}
    return {}


class Record:
    """The report of a run: kept on disk as it grows, so that an interrupt loses nothing that was measured."""

    def __init__(self, settings: Settings, out: Path, notes: Sequence[str], kind: str = "benchmark") -> None:
        """`out`: the folder of <kind>.json, <kind>.csv and the images."""
        self.out = out
        self.settings = settings
        self.workers: list[Worker] = []
        self.report: dict[str, Any] = {
            "format": FORMAT,
            "kind": kind,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": " ".join(["sd-ort", *sys.argv[1:]]),
            "commit": measure.commit(),
            "machine": measure.machine(),
            "versions": measure.versions(),
            "settings": asdict(settings),
            "notes": list(notes),
            "finished": False,
            "interrupted": False,
            "baseline": None,
            "engines": [],
        }

    def save(self) -> None:
        """Write what is known now. Raises OutputError when `out` cannot be written."""
        rows = []
        for batch in self.settings.batches:
            cases = [(worker, worker.cases[batch]) for worker in self.workers if batch in worker.cases]
            first = next(((worker, case) for worker, case in cases if case.step_ms), None)
            if first is not None and self.report["baseline"] is None:
                self.report["baseline"] = first[0].engine.label
            rows += [worker.row(case, first[1] if first else None, self.settings) for worker, case in cases]
        self.report["engines"] = rows
        self.write()
        measure.write_text(self.out / f"{self.report['kind']}.csv", to_csv(self.report))

    @contextmanager
    def kept(self, save: Callable[[], None]) -> Iterator[None]:
        """However the block ends, the report says so and is saved: it is `finished`, `interrupted`, or neither."""
        try:
            yield
            self.report["finished"] = True
        except KeyboardInterrupt:
            self.report["interrupted"] = True
            raise
        finally:
            save()

    def write(self) -> None:
        """Write the report as it is. Raises OutputError when `out` cannot be written."""
        measure.write_json(self.out / f"{self.report['kind']}.json", self.report)


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
    meter = device.open_meter(settings.provider)
    record = Record(settings, out, [*notes, *_notes(settings, meter)], kind)
    if jobs > 1:
        record.report["notes"].append(
            f"{jobs} folders were made and {jobs} engines loaded at a time: those times suffer."
        )
    with record.kept(record.save):
        prepared = prepare(engines, settings, work or out / "work", jobs, say)
        for group in [[item] for item in prepared] if settings.sequential else [prepared]:
            _measure(group, settings, record, meter, jobs, say)
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
            folder, seconds = variants.make(recipe, raw, work, wanted)
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


def _measure(
    group: Sequence[Prepared],
    settings: Settings,
    record: Record,
    meter: device.Meter,
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


def _notes(settings: Settings, meter: device.Meter) -> list[str]:
    """What a reader of the numbers has to know."""
    notes = []
    if settings.tuning:
        notes.append(_tuning_note(settings.provider))
    if op_library() is None:
        notes.append("no custom-op library was found: fused operators ran as plain ONNX functions.")
    if settings.sequential:
        notes.append("engines ran one after the other: ratios compare different moments.")
    energy = "of the whole device, idle power included" if meter.energy_J() is not None else meter.note
    notes.append(f"energy: {energy}.")
    return notes


def tuners(provider: str, *, library: bool = True) -> list[str]:
    """What --tuning turns on: the provider's own search for its fastest kernels, that of the op library, or nothing."""
    entry = provider_named(provider)
    found = [f"the {provider} provider's"] if entry.tuning else []
    if library and tuning.gpu_library(entry.ep, op_library()) is not None:
        found.append("the op library's")
    return found


def is_tuned(engine: Engine, provider: str) -> bool:
    """Whether --tuning means something to an engine."""
    return engine.engine == "onnxruntime" and bool(tuners(provider, library=engine.library))


def _tuning_note(provider: str) -> str:
    if found := tuners(provider):
        return f"--tuning was on: {' and '.join(found)} kernels were searched for the fastest."
    missing = provider_named(provider).ep in tuning.GPU_LIBRARIES
    advice = ", and no op library is built for it (sd-ort build-ops)" if missing else ""
    return f"--tuning changed nothing: the {provider} provider has no tunable operators{advice}."


def speedup(times: Sequence[float], baseline: Sequence[float]) -> dict[str, Any]:
    """How often faster than the baseline, round by round: baseline / time of the same round, and its spread."""
    return measure.summary([base / own for base, own in zip(baseline, times, strict=False)])


# --- The report as text ---------------------------------------------------------------------------------------------


def to_csv(report: dict[str, Any]) -> str:
    """The engines that ran, in the columns of ONNX Runtime's Stable Diffusion benchmark; latencies in s a batch.

    Memory is the device's on a GPU, where it was read, as ONNX Runtime's benchmark has it. In component mode a latency
    is one call's and `steps` is 1.
    """
    settings, versions = report["settings"], report["versions"]
    onnxruntime = next((v for name, v in versions.items() if name.startswith("onnxruntime")), "")
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in report["engines"]:
        if row["status"] != "ok" or "step_ms" not in row:
            continue
        on_device = "device_" if "device_first_run_memory_MB" in row else ""
        key, scale = ("image_s", row["batch"]) if "image_s" in row else ("step_ms", 1e-3)
        writer.writerow(
            {
                "model_name": " ".join(filter(None, (row["model"], settings["component"]))),
                "directory": row["directory"],
                "engine": row["engine"],
                "version": versions.get("torch", "") if row["engine"] == "torch" else onnxruntime,
                "provider": settings["provider"],
                "disable_safety_checker": True,
                "height": row["height"],
                "width": row["width"],
                "steps": settings["steps"] if "image_s" in row else 1,
                "batch_size": row["batch"],
                "batch_count": len(row[key]["values"]),
                "num_prompts": 1,
                "average_latency": row[key]["mean"] * scale,
                "median_latency": row[key]["median"] * scale,
                "first_run_memory_MB": row[f"{on_device}first_run_memory_MB"],
                "second_run_memory_MB": row[f"{on_device}second_run_memory_MB"],
                "enable_cuda_graph": row["graph"] or row["variant"] in ("graph", "compile"),
            }
        )
    return text.getvalue()


def to_table(report: dict[str, Any]) -> str:
    """The report as an aligned table for a terminal, then the failures and the notes, one a line."""
    lines = [[name for name, _ in COLUMNS]]
    failures = []
    for row in report["engines"]:
        if row["status"] != "ok":
            failures.append(f"{row['label']} (batch {row['batch']}) failed: {row['reason']}")
        if "step_ms" in row:
            lines.append([cell(row) for _, cell in COLUMNS])
    used = [i for i in range(len(COLUMNS)) if i == 0 or any(line[i] != "-" for line in lines[1:])]
    lines = [[line[i] for i in used] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = []
    for name, *numbers in lines:
        padded = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)]
        table.append("  ".join([name.ljust(widths[0]), *padded]))
    return "\n".join([*table, *failures, *report["notes"]])


def _number(row: dict[str, Any], key: str, form: str, unit: str = "") -> str:
    value = row.get(key)
    value = value["median"] if isinstance(value, dict) else value
    return "-" if value is None else f"{value:{form}}{unit}"


def _faster(row: dict[str, Any]) -> str:
    ratio = row.get("image_speedup", row.get("step_speedup"))
    return f"{ratio['median']:.2f}x ({ratio['min']:.2f}-{ratio['max']:.2f})" if ratio else "-"


def _error(row: dict[str, Any]) -> str:
    return "not finite" if "error" in row and row["error"] is None else _number(row, "error", ".1e")


# Header -> a row's cell; columns that are "-" in every row are not shown.
COLUMNS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("engine", lambda row: row["label"]),
    ("batch", lambda row: str(row["batch"])),
    ("dtype", lambda row: row.get("precision", "-")),
    ("step", lambda row: _number(row, "step_ms", ".2f", " ms")),
    ("image", lambda row: _number(row, "image_s", ".3f", " s")),
    ("faster (spread)", _faster),
    ("host memory", lambda row: _number(row, "peak_memory_MB", ".0f", " MB")),
    ("device memory", lambda row: _number(row, "device_peak_memory_MB", ".0f", " MB")),
    ("energy", lambda row: _number(row, "energy_J", ".2f", " J")),
    ("make", lambda row: _number(row, "make_s", ".1f", " s")),
    ("load", lambda row: _number(row, "load_s", ".1f", " s")),
    ("first run", lambda row: _number(row, "first_run_s", ".2f", " s")),
    ("tuning", lambda row: _number(row, "tuning_s", ".1f", " s")),
    ("PSNR", lambda row: _number(row, "psnr_db", ".1f", " dB")),
    ("error", _error),
)
