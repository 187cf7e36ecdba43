"""MLPerf Inference's text-to-image task, driven by its LoadGen (`benchmark.loadgen`).

    SingleStream   one query after another: 90th percentile of the latency
    Offline        all queries at once: images per second
    Server         queries arrive as a Poisson process and wait: 99th percentile of the latency, including the wait

By the rules (mlcommons/inference_policies, Inference v5.1) SDXL generates COCO-2014 captions at 1024 x 1024 in 20
EulerDiscrete steps with guidance 8, all from one latent, for at least ten minutes, and the server's 99th percentile is
at most 20 s: `official`. Other models, sizes, steps and counts get a note that the result is no valid MLPerf result.

LoadGen drives one engine in its own process, or the replicas of `sd-ort serve` (`benchmark.replicas`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from sd_ort.benchmark import loadgen, quality, replicas
from sd_ort.benchmark.engines import interface
from sd_ort.benchmark.engines.interface import BenchmarkSettings, Engine
from sd_ort.benchmark.loadgen import LoadGenSettings
from sd_ort.benchmark.report_file import ReportFile
from sd_ort.benchmark.runner import BuiltEngine, build_engines
from sd_ort.benchmark.worker import Worker
from sd_ort.core.errors import InputError, SdOrtError
from sd_ort.core.files import JSON_LIMIT, read_regular
from sd_ort.core.pipeline_folder import read_index
from sd_ort.core.progress import ProgressCallback, ignore_progress
from sd_ort.demo import FOLDERS, fidelity
from sd_ort.runtime import device_meters
from sd_ort.serving.dispatch import largest_size

CAPTION_LIMIT = 2000  # characters; COCO's longest caption has 251
# Captions in the style of COCO's, written for sd-ort, for models that generate more than the demo's shapes.
CAPTIONS = (
    "a dog sleeping on a couch next to a lamp",
    "two people riding bicycles along a river",
    "a bowl of fruit on a wooden kitchen table",
    "a train arriving at a small station in the snow",
    "a child flying a kite on a wide beach",
    "a city street at night with wet pavement",
    "a cat looking out of an open window",
    "a plate of pasta with tomatoes and basil",
)


@dataclass(frozen=True)
class Options:
    """Options of an MLPerf run.

    Args:
        queries: images per scenario.
        server_load: arrivals per second in Server, as a share of Offline's images per second.
        official: MLPerf's counts, durations and settings.
        accuracy: adds an accuracy run, which logs every image.
        captions: file of prompts.
        weights: for CLIP score and FID.
        gpus, replicas: number of replicas, one per GPU or all on one device, instead of one engine.
    """

    queries: int = 32
    server_load: float = 0.8
    official: bool = False
    accuracy: bool = False
    captions: Path | None = None
    weights: quality.AccuracyWeights = field(default_factory=quality.AccuracyWeights)
    gpus: int | None = None
    replicas: int | None = None


def run(
    engines: Sequence[Engine],
    settings: BenchmarkSettings,
    out: Path,
    options: Options,
    *,
    notes: Sequence[str] = (),
    work: Path | None = None,
    jobs: int = 1,
    overwrite: bool = False,
    on_progress: ProgressCallback = ignore_progress,
) -> dict[str, Any]:
    """Run LoadGen on one engine after another; return the report, which is saved in `out`/mlperf.json.

    LoadGen's logs are in `out`/mlperf/<number>/<scenario>. Offline and Server use batches of one and of
    `settings.batches`. A failing engine is a row with its reason; an interrupt keeps the measurements.

    Raises:
        InputError: for invalid captions, weights or engines, before anything is generated.
    """
    loadgen.require()
    if settings.component:
        raise InputError("--mlperf generates images: leave out --component.")
    options.weights.check()
    captions = read_captions(options.captions) if options.captions else None
    note = (
        f"{options.queries} queries per scenario, Server at {options.server_load:.0%} of Offline's rate: "
        "not a valid MLPerf result."
    )
    if options.official:
        settings = official_settings(engines, settings)
        note = "MLPerf's counts and settings; valid only with its 5000 captions, weights and review."
    report = ReportFile(settings, out, [*notes, note], "mlperf", overwrite)
    report.out.check(*(name for number, _ in enumerate(engines, 1) for name in log_files(number)))
    names = ["queries", "server_load", "official"]
    if options.gpus or options.replicas:
        names += ["gpus", "replicas"]
        for engine in engines:
            replicas.replica_configs(engine, settings, options.gpus, options.replicas)  # raises InputError
    report.report["mlperf"] = {name: getattr(options, name) for name in names}
    meter = device_meters.open_meter(settings.provider)
    rows: list[dict[str, Any]] = report.report["engines"]

    def save() -> None:
        for row in rows:
            if row["status"] == "running":
                row |= {"status": "failed", "reason": "interrupted"}
        report.write()

    with report.saving(save):
        for built in build_engines(engines, settings, work or out / "work", jobs, on_progress):
            rows.append({"label": built.engine.label, "model": built.engine.model, "status": "running"})
            report.write()
            logs = out / "mlperf" / f"{len(rows)}"
            try:
                _measure(built, settings, meter, options, captions, logs, report, on_progress)
            except SdOrtError as error:
                rows[-1] |= {"status": "failed", "reason": str(error)}
            finally:
                report.out.record(*log_files(len(rows)))
            report.write()
    return report.report


def log_files(number: int) -> list[str]:
    """Return the paths of the logs of an engine, by its number in the report."""
    return [f"mlperf/{number}/{run}/{name}" for run in (*loadgen.SCENARIOS, "accuracy") for name in loadgen.FILES]


def official_settings(engines: Sequence[Engine], settings: BenchmarkSettings) -> BenchmarkSettings:
    """Return settings with the rules' steps, guidance, size and latent. Raises InputError if not SDXL with Euler."""
    for engine in engines:
        folder = Path(engine.raw_export or engine.directory)
        index = read_index(folder) if folder.is_dir() else {}
        scheduler = (index.get("scheduler") or ["", ""])[1]
        if "XL" not in index.get("_class_name", "") or scheduler != "EulerDiscreteScheduler":
            raise InputError(
                f"MLPerf's task is SDXL base with EulerDiscreteScheduler, not {folder}: leave out --official."
            )
    return replace(settings, steps=20, guidance=8.0, height=1024, width=1024, one_latent=True)


def _measure(
    built: BuiltEngine,
    settings: BenchmarkSettings,
    meter: device_meters.DeviceMeter,
    options: Options,
    captions: Sequence[str] | None,
    logs: Path,
    report: ReportFile,
    on_progress: ProgressCallback,
) -> None:
    """Fill the last row of the report, scenario by scenario."""
    engine, row = built.engine, report.report["engines"][-1]
    count = None if options.official else options.queries
    prompts = captions or prompts_for(engine.model, count or len(CAPTIONS), settings.seed)
    rate = 1.0
    with _backend(built, settings, meter, options, prompts) as backend:
        backend.warm_up()
        for name in loadgen.SCENARIOS:
            on_progress(f"{engine.label}: {name}")
            batch, callers = (1, 1) if name == "SingleStream" else (backend.batch, backend.callers)
            at_once = batch * settings.calls if name == "Offline" and callers == 1 else batch
            load = LoadGenSettings(name, len(prompts), at_once, count, rate, callers=callers)
            row[name] = loadgen.run(backend, load, logs / name) | {"batch": batch, "mean_batch": backend.mean_batch()}
            if name == "Offline":
                rate = options.server_load * row[name]["images_per_s"]
            if name == "Server":
                row[name]["rate_per_s"] = rate
            report.write()
        if options.accuracy:
            on_progress(f"{engine.label}: accuracy")
            load = LoadGenSettings("Offline", len(prompts), backend.batch, count, rate, True, backend.callers)
            loadgen.run(backend, load, logs / "accuracy")
    row["quality"] = quality.scores(engine.model, prompts, backend.images, options.weights)
    row["status"] = "ok"


@contextmanager
def _backend(
    built: BuiltEngine,
    settings: BenchmarkSettings,
    meter: device_meters.DeviceMeter,
    options: Options,
    prompts: Sequence[str],
) -> Iterator[WorkerBackend | replicas.ReplicaBackend]:
    """Yield what LoadGen drives. Raises SdOrtError if the engine cannot be used."""
    if built.failure:
        raise SdOrtError(built.failure)
    if options.gpus or options.replicas:
        with replicas.on_ray(built.engine, prompts, settings, options.gpus, options.replicas) as backend:
            yield backend
        return
    with Worker(built.engine, meter) as worker:
        worker.load(settings)
        if worker.failure:
            raise SdOrtError(worker.failure)
        yield WorkerBackend(worker, prompts, settings.batches)


class WorkerBackend:
    """Generates prompts by index on a worker, one or as many of `sizes` at once; `images`: the last of each prompt.

    Other numbers are split as by `serving.dispatch`.
    """

    callers = 1

    def __init__(self, worker: Worker, prompts: Sequence[str], sizes: Sequence[int]) -> None:
        self.worker, self.prompts = worker, prompts
        self.sizes = sorted({1, *sizes})
        self.batch = self.sizes[-1]
        self.images: dict[int, np.ndarray] = {}
        self.batches: list[int] = []  # sizes since the last call of mean_batch

    def warm_up(self) -> None:
        """Generate a batch of each size."""
        for size in self.sizes:
            self([i % len(self.prompts) for i in range(size)])
        self.batches.clear()

    def __call__(self, indices: Sequence[int]) -> list[np.ndarray]:
        """Generate uint8 images (H, W, 3) in batches. Raises SdOrtError if the engine fails."""
        images: list[np.ndarray] = []
        while rest := indices[len(images) :]:
            size = largest_size(self.sizes, len(rest))
            images += self._batches(rest[: len(rest) // size * size], size)
        return images

    def _batches(self, indices: Sequence[int], size: int) -> list[np.ndarray]:
        result, _ = self.worker.call(interface.run_batch, size, [self.prompts[i] for i in indices], 0)
        images = list(result["images"])
        self.images |= dict(zip(indices, images, strict=True))
        self.batches += [size] * (len(indices) // size)
        return images

    def mean_batch(self) -> float:
        """Return the mean batch size since the last call."""
        mean = float(np.mean(self.batches or [0]))
        self.batches.clear()
        return mean


# --- Prompts --------------------------------------------------------------------------------------------------------


def prompts_for(model: str, count: int, seed: int) -> list[str]:
    """Return prompts that the demo model was not trained on, or for other models CAPTIONS repeated."""
    if model in FOLDERS:
        return list(fidelity.unseen_prompts(count, seed))
    return [CAPTIONS[i % len(CAPTIONS)] for i in range(count)]


def read_captions(path: Path) -> list[str]:
    """Return the captions of COCO-2014's captions_val2014.json (one per image), MLPerf's .tsv, or a text file.

    The .tsv has a column `caption`, a text file one prompt per line. Raises InputError for other files.
    """
    try:
        content = read_regular(path, limit=JSON_LIMIT)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    try:
        text = content.decode()
        if path.suffix == ".json":
            entries = reversed(json.loads(text)["annotations"])  # the first caption of an image counts
            captions = list({str(entry["image_id"]): entry["caption"] for entry in entries}.values())
        elif path.suffix == ".tsv":
            header, *rows = (line.split("\t") for line in text.splitlines())
            captions = [row[header.index("caption")] for row in rows]
        else:
            captions = text.splitlines()
        captions = [" ".join(caption.split()) for caption in captions if caption.strip()]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise InputError(
            f"{path} holds no captions: give COCO's captions JSON, a .tsv, or a prompt per line."
        ) from error
    if not captions or max(map(len, captions)) > CAPTION_LIMIT:
        raise InputError(f"{path} holds no captions of 1 to {CAPTION_LIMIT} characters: give a prompt per line.")
    return captions


# --- The table ------------------------------------------------------------------------------------------------------


def to_table(report: dict[str, Any]) -> str:
    """Return one line per engine, and the notes."""
    lines = []
    for row in report["engines"]:
        if row["status"] != "ok":
            lines.append(f"{row['label']} failed: {row['reason']}")
            continue
        single, server, score = row["SingleStream"]["latency_s"], row["Server"], row["quality"]["fidelity_percent"]
        fidelity_note = f"{score:.0f} % right" if isinstance(score, float) else "quality not scored"
        lines.append(
            f"{row['label']}: SingleStream p90 {single['p90']:.2f} s; Offline {row['Offline']['images_per_s']:.2f}/s; "
            f"Server at {server['rate_per_s']:.2f}/s p99 {server['latency_s']['p99']:.2f} s; {fidelity_note}"
        )
    return "\n".join([*lines, *report["notes"]])
