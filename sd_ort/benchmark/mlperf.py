"""MLPerf Inference's text-to-image task, driven by its own LoadGen (`benchmark.loadgen`).

    SingleStream   one query after another: 90th percentile of the latency
    Offline        all queries at once: images per second
    Server         queries arrive as a Poisson process and wait: 99th percentile of the latency, wait included

By its rules (mlcommons/inference_policies, Inference v5.1) SDXL draws COCO-2014 captions at 1024 x 1024 in 20
EulerDiscrete steps with guidance 8, all from one latent, for at least ten minutes, and the server's 99th percentile is
at most 20 s: `official`. Otherwise model, size, steps and counts are those asked for, and a note says that this is no
valid MLPerf result.

What is driven is one engine in a process of its own, or, with `Options.gpus` or `Options.replicas`, the replicas of
`sd-ort serve` (`benchmark.replicas`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sd_ort.benchmark import loadgen, quality, replicas
from sd_ort.benchmark.engines import interface
from sd_ort.benchmark.engines.interface import Engine, Settings
from sd_ort.benchmark.loadgen import Load
from sd_ort.benchmark.report_file import Record
from sd_ort.benchmark.runner import Prepared, prepare
from sd_ort.benchmark.worker import Worker
from sd_ort.core.errors import InputError, SdOrtError
from sd_ort.core.files import JSON_LIMIT
from sd_ort.core.pipeline_folder import read_index
from sd_ort.demo import fidelity
from sd_ort.runtime import device_meters

# Captions in the style of COCO's, ours, for models that draw more than the demo's shapes.
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
Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """`queries`: images per scenario. `load`: the server's arrivals per second, as a share of Offline's images per
    second. `official`: MLPerf's counts, durations and settings instead. `accuracy`: also an accuracy run, which logs
    every image. `captions`: a file of prompts. `clip`: a folder with a CLIP model; `inception` and `fid_stats`:
    Inception's weights and the statistics of the photographs, for FID. `gpus`, `replicas`: so many replicas, one a GPU
    or all on one device, instead of one engine."""

    queries: int = 32
    load: float = 0.8
    official: bool = False
    accuracy: bool = False
    captions: Path | None = None
    clip: Path | None = None
    inception: Path | None = None
    fid_stats: Path | None = None
    gpus: int | None = None
    replicas: int | None = None


def run(
    contenders: Sequence[Engine],
    settings: Settings,
    out: Path,
    options: Options,
    *,
    notes: Sequence[str] = (),
    work: Path | None = None,
    jobs: int = 1,
    say: Say = lambda _: None,
) -> dict[str, Any]:
    """Put one engine after another under LoadGen; the report is returned and kept in `out`/mlperf.json.

    LoadGen's logs lie in `out`/mlperf/<engine>/<scenario>. The largest batch of `settings.batches` is the most that
    Offline and Server draw at once. A failing engine is a row with its reason; on an interrupt what was measured is
    kept. Raises InputError for captions or weights that cannot be used, before anything is drawn.
    """
    loadgen.require()
    if settings.component:
        raise InputError("--mlperf draws images: leave out --component.")
    quality.check(options.clip, options.inception, options.fid_stats)
    captions = read_captions(options.captions) if options.captions else None
    if options.official:
        settings = official_settings(contenders, settings)
        about = "MLPerf's counts and settings; valid only with its 5000 captions, weights and review."
    else:
        about = (
            f"{options.queries} queries per scenario, Server at {options.load:.0%} of Offline's rate: "
            "not a valid MLPerf result."
        )
    record = Record(settings, out, [*notes, about], "mlperf")
    record.report["mlperf"] = {"queries": options.queries, "load": options.load, "official": options.official}
    if options.gpus or options.replicas:
        for engine in contenders:
            replicas.openings(engine, settings, options.gpus, options.replicas)  # what cannot be raises here
        record.report["mlperf"] |= {"gpus": options.gpus, "replicas": options.replicas}
    meter = device_meters.open_meter(settings.provider)
    rows: list[dict[str, Any]] = record.report["engines"]

    def save() -> None:
        for row in rows:
            if row["status"] == "running":
                row |= {"status": "failed", "reason": "interrupted"}
        record.write()

    with record.kept(save):
        for item in prepare(contenders, settings, work or out / "work", jobs, say):
            rows.append({"label": item.engine.label, "model": item.engine.model, "status": "running"})
            record.write()
            logs = out / "mlperf" / f"{len(rows)}"
            _measure(item, settings, meter, options, captions, logs, rows[-1], record.write, say)
            record.write()
    return record.report


def official_settings(contenders: Sequence[Engine], settings: Settings) -> Settings:
    """The rules' steps, guidance, size and single latent. Raises InputError for a model that is not SDXL with Euler."""
    for engine in contenders:
        folder = Path(engine.raw or engine.directory)
        index = read_index(folder) if folder.is_dir() else {}
        scheduler = (index.get("scheduler") or ["", ""])[1]
        if "XL" not in index.get("_class_name", "") or scheduler != "EulerDiscreteScheduler":
            raise InputError(
                f"MLPerf's task is SDXL base with EulerDiscreteScheduler, not {folder}: leave out --official."
            )
    return replace(settings, steps=20, guidance=8.0, height=1024, width=1024, one_latent=True)


def _measure(
    item: Prepared,
    settings: Settings,
    meter: device_meters.Meter,
    options: Options,
    captions: Sequence[str] | None,
    logs: Path,
    row: dict[str, Any],
    save: Callable[[], None],
    say: Say,
) -> None:
    """Load one engine and fill its row, scenario by scenario."""
    count = None if options.official else options.queries
    prompts = captions or prompts_for(item.engine.model, count or len(CAPTIONS), settings.seed)
    try:
        with _opened(item, settings, meter, options, prompts) as draw:
            draw.warm_up()
            rate = 1.0
            for name in loadgen.SCENARIOS:
                say(f"{item.engine.label}: {name}")
                single = name == "SingleStream"
                load = Load(name, len(prompts), 1 if single else draw.batch, count, rate,
                            callers=1 if single else draw.callers)  # fmt: skip
                row[name] = loadgen.run(draw, load, logs / name)
                if name == "Offline":
                    rate = options.load * row[name]["images_per_s"]
                row[name] |= {"batch": load.batch, "mean_batch": draw.mean_batch()}
                row[name] |= {"rate_per_s": rate} if name == "Server" else {}
                save()
            if options.accuracy:
                say(f"{item.engine.label}: accuracy")
                load = Load("Offline", len(prompts), draw.batch, count, rate, accuracy=True, callers=draw.callers)
                loadgen.run(draw, load, logs / "accuracy")
        row["quality"] = quality.scores(item.engine.model, prompts, draw.images, options.clip, options.inception,
                                        options.fid_stats)  # fmt: skip
        row["status"] = "ok"
    except SdOrtError as error:
        row |= {"status": "failed", "reason": str(error)}


@contextmanager
def _opened(
    item: Prepared, settings: Settings, meter: device_meters.Meter, options: Options, prompts: Sequence[str]
) -> Iterator[Drawer | replicas.Replicas]:
    """What LoadGen drives. Raises SdOrtError for an engine that cannot be used."""
    if item.failure:
        raise SdOrtError(item.failure)
    if options.gpus or options.replicas:
        with replicas.on_ray(item.engine, prompts, settings, options.gpus, options.replicas) as several:
            yield several
        return
    with Worker(item.engine, meter) as worker:
        worker.load(settings)
        if worker.failure:
            raise SdOrtError(worker.failure)
        yield Drawer(worker, prompts, max(settings.batches))


class Drawer:
    """Draws prompts by number on a worker, up to `batch` at once, and keeps the last image of each."""

    callers = 1

    def __init__(self, worker: Worker, prompts: Sequence[str], batch: int) -> None:
        self.worker, self.prompts, self.batch = worker, prompts, batch
        self.images: dict[int, np.ndarray] = {}
        self.drawn: list[int] = []  # sizes of batches

    def warm_up(self) -> None:
        """Draw one image, and the largest batch."""
        for batch in dict.fromkeys((1, self.batch)):
            self([i % len(self.prompts) for i in range(batch)])
        self.drawn.clear()

    def __call__(self, numbers: Sequence[int]) -> list[np.ndarray]:
        """Draw a batch, uint8 images (H, W, 3). Raises SdOrtError when the engine fails."""
        prompts = [self.prompts[i] for i in numbers]
        result, _ = self.worker.call(interface.draw_batch, len(prompts), prompts, 0)
        images = list(result["images"])
        self.images |= dict(zip(numbers, images, strict=True))
        self.drawn.append(len(numbers))
        return images

    def mean_batch(self) -> float:
        """Images a batch of what was drawn since this was last asked."""
        mean = float(np.mean(self.drawn or [0]))
        self.drawn.clear()
        return mean


# --- Prompts --------------------------------------------------------------------------------------------------------


def prompts_for(model: str, count: int, seed: int) -> list[str]:
    """The demo model's unseen prompts, or captions in turn."""
    if model == "demo":
        return list(fidelity.unseen_prompts(count, seed))
    return [CAPTIONS[i % len(CAPTIONS)] for i in range(count)]


def read_captions(path: Path) -> list[str]:
    """The captions of COCO-2014's captions_val2014.json, one per image, of MLPerf's table of them (.tsv, a column
    `caption`), or of a text file, one per line. Raises InputError for a file that is none of these."""
    try:
        if path.stat().st_size > JSON_LIMIT:
            raise InputError(f"{path} is larger than {JSON_LIMIT >> 20} MiB: give a file of captions.")
        text = path.read_text()
        if path.suffix == ".json":
            first = {str(entry["image_id"]): entry["caption"] for entry in reversed(json.loads(text)["annotations"])}
            found = list(first.values())
        elif path.suffix == ".tsv":
            header, *rows = (line.split("\t") for line in text.splitlines())
            found = [row[header.index("caption")] for row in rows]
        else:
            found = text.splitlines()
        captions = [" ".join(caption.split()) for caption in found if caption.strip()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise InputError(
            f"{path} holds no captions: give COCO's captions JSON, a .tsv, or a prompt per line."
        ) from error
    if not captions or max(map(len, captions)) > CAPTION_LIMIT:
        raise InputError(f"{path} holds no captions of 1 to {CAPTION_LIMIT} characters: give a prompt per line.")
    return captions


CAPTION_LIMIT = 2000  # characters; COCO's longest has 251


# --- The table ------------------------------------------------------------------------------------------------------


def to_table(report: dict[str, Any]) -> str:
    """One line per engine."""
    lines = []
    for row in report["engines"]:
        if row["status"] != "ok":
            lines.append(f"{row['label']} failed: {row['reason']}")
            continue
        single, served, score = row["SingleStream"]["latency_s"], row["Server"], row["quality"]["fidelity_percent"]
        right = f"{score:.0f} % right" if isinstance(score, float) else "quality not scored"
        lines.append(
            f"{row['label']}: SingleStream p90 {single['p90']:.2f} s; Offline {row['Offline']['images_per_s']:.2f}/s; "
            f"Server at {served['rate_per_s']:.2f}/s p99 {served['latency_s']['p99']:.2f} s; {right}"
        )
    return "\n".join([*lines, *report["notes"]])
