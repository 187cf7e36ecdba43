"""Engines side by side in one run: latency a UNet step and an image, memory, time to load, and the image's error.

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
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

from sd_ort import engines, measure
from sd_ort.engines import Engine, Settings
from sd_ort.errors import InputError, SdOrtError
from sd_ort.folder import MODEL, components, read_manifest
from sd_ort.session import op_library, provider_named

FORMAT = 1
PRECISIONS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
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


# --- Which engines --------------------------------------------------------------------------------------------------


def find_engines(folders: Sequence[Path], torch_model: str | None = None) -> tuple[list[Engine], list[str]]:
    """The engines of a run, raw exports first, torch last; and notes on what was left out and why.

    For an optimized folder alone, the export it was made from joins when it still exists. `torch_model`: a diffusers
    folder, "demo", "none", or None for the model that the first folder was exported from, if it can be found.
    Raises InputError for a folder that is no pipeline, or a model that does not exist.
    """
    for folder in folders:
        components(folder)
    manifests = {folder: read_manifest(folder) for folder in folders}
    if not any(m.get("stage") == "export" for m in manifests.values()):
        for manifest in list(manifests.values()):
            raw = Path(str(manifest.get("source", {}).get("folder", "")))
            if manifest.get("stage") == "optimize" and read_manifest(raw).get("stage") == "export":
                manifests = {raw: read_manifest(raw), **manifests}
                break
    ordered = sorted(manifests, key=lambda folder: manifests[folder].get("stage") != "export")
    found = _distinct([_onnx_engine(folder, manifests[folder]) for folder in ordered])
    torch_engine, note = _torch_engine(torch_model, found[0])
    return [*found, *torch_engine], note


def _onnx_engine(folder: Path, manifest: dict[str, Any]) -> Engine:
    source, options, stage = manifest.get("source", {}), manifest.get("options", {}), manifest.get("stage", "")
    labels = {"export": "raw ONNX", "optimize": f"fused {PRECISIONS.get(options.get('dtype'), '')}".strip()}
    return Engine(
        label=labels.get(stage, folder.name),
        engine="onnxruntime",
        directory=str(folder),
        model=str(source.get("model") or folder.name),
        stage=stage,
        target=options.get("target", ""),
        random_weights=bool(source.get("random_weights")),
        weights_seed=options.get("seed"),
    )


def _distinct(found: list[Engine]) -> list[Engine]:
    """Labels that occur twice get the target, and if that does not tell them apart, the folder's name."""
    for extra in (lambda e: e.target, lambda e: Path(e.directory).name):
        labels = [e.label for e in found]
        found = [replace(e, label=f"{e.label} {extra(e)}".strip()) if labels.count(e.label) > 1 else e for e in found]
    return found


def _torch_engine(asked: str | None, first: Engine) -> tuple[list[Engine], list[str]]:
    """([torch eager on the asked model or on the first engine's own], []), or ([], [why there is none])."""
    torch = replace(first, label="torch eager", engine="torch", stage="torch", target="")
    if asked == "none":
        return [], []
    if asked:
        if asked != "demo" and not is_diffusers_folder(Path(asked)):
            raise InputError(f"{asked} is not a diffusers folder: give one, `demo` or `none` to --torch.")
        return [replace(torch, directory=asked, model=asked, random_weights=False)], []
    if first.random_weights and first.weights_seed is None:
        return [], ["torch eager was not measured: the export, which records the seed of its random weights, is gone."]
    if first.random_weights or first.model == "demo" or is_diffusers_folder(Path(first.model)):
        return [replace(torch, directory=first.model)], []
    return [], [f"torch eager was not measured: {first.model!r} is no diffusers folder on this machine (use --torch)."]


def is_diffusers_folder(folder: Path) -> bool:
    """Whether a folder is a pipeline with torch weights, and not one of ONNX models."""
    return (folder / "model_index.json").is_file() and not (folder / "unet" / MODEL).is_file()


# --- The run --------------------------------------------------------------------------------------------------------


class Worker:
    """An engine in a process of its own, and what was measured of it."""

    def __init__(self, engine: Engine) -> None:
        """Start the process; nothing is loaded yet."""
        self.engine = engine
        self.pool = ProcessPoolExecutor(1, get_context("spawn"), initializer=engines.start_process)
        self.process = psutil.Process(self.pool.submit(os.getpid).result())
        self.loaded: dict[str, Any] = {}
        self.failure: str | None = None
        self.image_s: list[float] = []
        self.step_ms: list[float] = []
        self.memory: list[float] = []
        self.images: np.ndarray | None = None

    def load(self, settings: Settings) -> None:
        """Open the engine; a failure becomes the row's reason."""
        self.loaded = self._call(engines.load, self.engine, settings) or {}

    def draw(self, *, counted: bool) -> None:
        """Draw one batch, unless the engine has failed; a warm-up run leaves only its memory and image."""
        result = self._call(engines.draw_batch)
        if result is None:
            return
        self.images = result["images"]
        self.memory.append(result["memory_MB"])
        if counted:
            self.image_s.append(result["seconds"] / len(result["images"]))
            self.step_ms.append(1e3 * median(result["steps"]))

    def row(self, baseline: Worker | None) -> dict[str, Any]:
        """The engine's row of the report. Speed-ups and PSNR are relative to `baseline`, None while nothing has run.

        `unet_step_ms` is one call of the UNet for the whole batch, guidance included; `image_s` is the time of a batch
        over its images. There is no PSNR between images of different sizes.
        """
        row = {**asdict(self.engine), "status": "failed" if self.failure else "ok", **self.loaded}
        if self.failure:
            row["reason"] = self.failure
        if self.memory:
            row["first_run_memory_MB"] = self.memory[0]
            row["second_run_memory_MB"] = self.memory[min(1, len(self.memory) - 1)]
            row["peak_memory_MB"] = max([*self.memory, self.loaded["load_memory_MB"]])
        if self.image_s and self.images is not None and baseline is not None and baseline.images is not None:
            row["height"], row["width"] = self.images.shape[1:3]
            row["image_s"] = measure.summary(self.image_s)
            row["unet_step_ms"] = measure.summary(self.step_ms)
            row["image_speedup"] = speedup(self.image_s, baseline.image_s)
            row["unet_step_speedup"] = speedup(self.step_ms, baseline.step_ms)
            if self.images.shape == baseline.images.shape:
                row["psnr_db"] = median(map(measure.psnr, self.images, baseline.images))
        return row

    def save_image(self, out: Path) -> None:
        """Write the first image drawn as `<label>.png`."""
        from PIL import Image

        if self.images is not None:
            buffer = io.BytesIO()
            Image.fromarray(self.images[0]).save(buffer, "PNG")
            measure.write_bytes(out / f"{self.engine.label.replace(' ', '-')}.png", buffer.getvalue())

    def kill(self) -> None:
        """End the process, in the middle of a run too."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.process.kill()

    def _call(self, function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any] | None:
        """Run a function in the process; None, and the reason kept, when it fails or has failed before."""
        if self.failure:
            return None
        try:
            return self.pool.submit(function, *arguments).result()
        except BrokenProcessPool:
            self.failure = "its process was ended by the system: most likely it ran out of memory"
        except SdOrtError as error:
            self.failure = str(error)
        return None


class Record:
    """The report of a run: kept on disk as it grows, so that an interrupt loses nothing that was measured."""

    def __init__(self, settings: Settings, out: Path, notes: Sequence[str]) -> None:
        """`out`: the folder of benchmark.json, benchmark.csv and the images."""
        self.out = out
        self.workers: list[Worker] = []
        self.report: dict[str, Any] = {
            "format": FORMAT,
            "kind": "benchmark",
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
        baseline = next((worker for worker in self.workers if worker.image_s), None)
        self.report["baseline"] = baseline.engine.label if baseline else None
        self.report["engines"] = [worker.row(baseline) for worker in self.workers]
        measure.write_json(self.out / "benchmark.json", self.report)
        measure.write_text(self.out / "benchmark.csv", to_csv(self.report))


def run(
    engines: Sequence[Engine],
    settings: Settings,
    out: Path,
    *,
    notes: Sequence[str] = (),
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure the engines; the report is returned, and kept in `out` as benchmark.json, .csv and one PNG an engine.

    An engine that fails is a row with `status` "failed" and its `reason`. On an interrupt the report is marked
    `interrupted`, and KeyboardInterrupt goes on.
    """
    record = Record(settings, out, [*notes, *_notes(settings)])
    try:
        for group in [[engine] for engine in engines] if settings.sequential else [list(engines)]:
            _measure(group, settings, record, say)
        record.report["finished"] = True
    except KeyboardInterrupt:
        record.report["interrupted"] = True
        raise
    finally:
        record.save()
    return record.report


def _measure(group: Sequence[Engine], settings: Settings, record: Record, say: Callable[[str], None]) -> None:
    """Run engines in turn: one batch each, round after round, warm-up rounds first."""
    workers: list[Worker] = []
    try:
        for engine in group:
            say(f"loading {engine.label} ({engine.directory})")
            workers.append(Worker(engine))
            record.workers.append(workers[-1])
            workers[-1].load(settings)
            record.save()
        rounds = settings.warmup + settings.runs
        for index in range(rounds):
            say(f"round {index + 1} of {rounds}{' (warm-up)' if index < settings.warmup else ''}")
            for worker in workers:
                worker.draw(counted=index >= settings.warmup)
                record.save()
        for worker in workers:
            worker.save_image(record.out)
    except BaseException:
        for worker in workers:
            worker.kill()
        raise
    finally:
        for worker in workers:
            worker.pool.shutdown()


def _notes(settings: Settings) -> list[str]:
    """What a reader of the numbers has to know."""
    notes = []
    if settings.tuning and not provider_named(settings.provider).tuning:
        notes.append(f"the {settings.provider} provider has no tunable operators: --tuning changed nothing.")
    if op_library() is None:
        notes.append("no custom-op library was found: fused operators ran as plain ONNX functions.")
    if settings.sequential:
        notes.append("engines ran one after the other: ratios compare different moments.")
    return notes


def speedup(times: Sequence[float], baseline: Sequence[float]) -> dict[str, Any]:
    """How often faster than the baseline, round by round: baseline / time of the same round, and its spread."""
    return measure.summary([base / own for base, own in zip(baseline, times, strict=False)])


def to_csv(report: dict[str, Any]) -> str:
    """The engines that ran, in the columns of ONNX Runtime's Stable Diffusion benchmark; latencies in s a batch."""
    settings, versions = report["settings"], report["versions"]
    onnxruntime = next((v for name, v in versions.items() if name.startswith("onnxruntime")), "")
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in report["engines"]:
        if row["status"] != "ok" or "image_s" not in row:
            continue
        writer.writerow(
            {
                "model_name": row["model"],
                "directory": row["directory"],
                "engine": row["engine"],
                "version": versions.get("torch", "") if row["engine"] == "torch" else onnxruntime,
                "provider": settings["provider"],
                "disable_safety_checker": True,
                "height": row["height"],
                "width": row["width"],
                "steps": settings["steps"],
                "batch_size": settings["batch"],
                "batch_count": len(row["image_s"]["values"]),
                "num_prompts": 1,
                "average_latency": row["image_s"]["mean"] * settings["batch"],
                "median_latency": row["image_s"]["median"] * settings["batch"],
                "first_run_memory_MB": row["first_run_memory_MB"],
                "second_run_memory_MB": row["second_run_memory_MB"],
                "enable_cuda_graph": False,
            }
        )
    return text.getvalue()


def to_table(report: dict[str, Any]) -> str:
    """The report as an aligned table for a terminal, then the failures and the notes, one a line."""
    header = ["engine", "dtype", "UNet step", "image", "faster (spread)", "peak memory", "load", "PSNR"]
    lines, failures = [header], []
    for row in report["engines"]:
        if row["status"] != "ok":
            failures.append(f"{row['label']} failed: {row['reason']}")
        if "image_s" not in row:
            continue
        faster = row["image_speedup"]
        lines.append(
            [
                row["label"],
                row["precision"],
                f"{row['unet_step_ms']['median']:.1f} ms",
                f"{row['image_s']['median']:.3f} s",
                f"{faster['median']:.2f}x ({faster['min']:.2f}-{faster['max']:.2f})",
                f"{row['peak_memory_MB']:.0f} MB",
                f"{row['load_s']:.1f} s",
                f"{row['psnr_db']:.1f} dB" if "psnr_db" in row else "-",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = []
    for name, *numbers in lines:
        padded = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)]
        table.append("  ".join([name.ljust(widths[0]), *padded]))
    return "\n".join([*table, *failures, *report["notes"]])
