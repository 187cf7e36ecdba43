"""MLPerf Inference's three scenarios on Stable Diffusion, scaled to the model: the same loads, fewer queries.

    SingleStream   one query after another: 90th percentile of the latency
    Offline        all queries at once: images per second
    Server         queries arrive as a Poisson process and wait: 99th percentile of the latency, wait included

MLPerf's own SDXL task draws 5000 COCO captions at 1024 x 1024 in 20 Euler steps with guidance 8, and bounds the
server's 99th percentile at 20 s (mlcommons/inference_policies). Here prompts, size and steps are those of the model,
and the server's rate is a share of what Offline reached: the results are not official MLPerf results.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sd_ort.benchmark.engines import contract
from sd_ort.benchmark.engines.contract import Engine, Settings
from sd_ort.benchmark.record import Record
from sd_ort.benchmark.runner import Prepared, prepare
from sd_ort.benchmark.worker import Worker
from sd_ort.core.errors import InputError, SdOrtError
from sd_ort.demo import fidelity
from sd_ort.runtime import device

PERCENTILES = (50, 90, 95, 99)
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


def run(
    contenders: Sequence[Engine],
    settings: Settings,
    out: Path,
    *,
    queries: int = 32,
    load: float = 0.8,
    notes: Sequence[str] = (),
    work: Path | None = None,
    jobs: int = 1,
    say: Say = lambda _: None,
) -> dict[str, Any]:
    """Put one engine after another under the three loads; the report is returned and kept in `out`/mlperf.json.

    `queries`: images per scenario. `load`: the server's arrivals per second, as a share of Offline's images per second.
    The largest batch of `settings.batches` is the most that Offline and Server draw at once. A failing engine is a row
    with its reason; on an interrupt what was measured is kept.
    """
    if settings.component:
        raise InputError("--mlperf draws images: leave out --component.")
    record = Record(settings, out, [*notes, _about(queries, load)], "mlperf")
    record.report["mlperf"] = {"queries": queries, "load": load}
    meter = device.open_meter(settings.provider)
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
            _measure(item, settings, meter, queries, load, rows[-1], record.write, say)
            record.write()
    return record.report


def _about(queries: int, load: float) -> str:
    return f"{queries} queries per scenario, Server at {load:.0%} of Offline's rate: not an official MLPerf result."


def _measure(
    item: Prepared,
    settings: Settings,
    meter: device.Meter,
    queries: int,
    load: float,
    row: dict[str, Any],
    save: Callable[[], None],
    say: Say,
) -> None:
    """Load one engine and fill its row, scenario by scenario."""
    try:
        with Worker(item.engine, meter, item.failure) as worker:
            worker.load(settings)
            if worker.failure:
                raise SdOrtError(worker.failure)
            prompts = prompts_for(item.engine.model, queries, settings.seed)
            most = max(settings.batches)
            draw = Drawer(worker, prompts)
            for batch in dict.fromkeys((1, most)):  # warm up, untimed
                draw(range(min(batch, queries)))
            scenarios: dict[str, Callable[[], dict[str, Any]]] = {
                "SingleStream": lambda: single_stream(draw, queries),
                "Offline": lambda: offline(draw, queries, most),
                "Server": lambda: server(draw, queries, most, load * row["Offline"]["images_per_s"], settings.seed),
            }
            for name, scenario in scenarios.items():
                say(f"{item.engine.label}: {name}")
                row[name] = scenario()
                save()
        row["quality"] = quality(item.engine.model, prompts, draw.images)
        row["status"] = "ok"
    except SdOrtError as error:
        row |= {"status": "failed", "reason": str(error)}


class Drawer:
    """Draws queries by number on a worker, query i from seed i, and keeps the images."""

    def __init__(self, worker: Worker, prompts: Sequence[str]) -> None:
        self.worker = worker
        self.prompts = prompts
        self.images: dict[int, np.ndarray] = {}

    def __call__(self, numbers: Sequence[int]) -> None:
        """Draw consecutive queries as one batch. Raises SdOrtError when the engine fails."""
        prompts = [self.prompts[i] for i in numbers]
        result, _ = self.worker.call(contract.draw_batch, len(prompts), prompts, numbers[0])
        self.images |= dict(zip(numbers, result["images"], strict=True))


# --- The scenarios --------------------------------------------------------------------------------------------------

Draw = Callable[[Sequence[int]], None]


def single_stream(draw: Draw, queries: int) -> dict[str, Any]:
    """One query after another, batch 1."""
    latencies = []
    for number in range(queries):
        start = time.perf_counter()
        draw(range(number, number + 1))
        latencies.append(time.perf_counter() - start)
    return {"latency_s": percentiles(latencies)}


def offline(draw: Draw, queries: int, batch: int) -> dict[str, Any]:
    """All queries at once, in batches of `batch`."""
    start = time.perf_counter()
    for first in range(0, queries, batch):
        draw(range(first, min(first + batch, queries)))
    seconds = time.perf_counter() - start
    return {"images_per_s": queries / seconds, "seconds": seconds, "batch": batch}


def server(
    draw: Draw,
    queries: int,
    batch: int,
    rate: float,
    seed: int,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Queries arrive at `rate` a second; what waits is drawn together, up to `batch`, as soon as the engine is free.

    Latency counts from arrival to the end of the query's batch.
    """
    due = arrivals(queries, rate, seed)
    latencies: list[float] = []
    batches: list[int] = []
    start = clock()
    while len(latencies) < queries:
        first = len(latencies)
        now = clock() - start
        if due[first] > now:
            sleep(due[first] - now)
            now = clock() - start
        waiting = max(1, int(np.searchsorted(due, now, side="right")) - first)
        numbers = range(first, first + min(waiting, batch))
        draw(numbers)
        end = clock() - start
        latencies += [end - due[i] for i in numbers]
        batches.append(len(numbers))
    return {
        "latency_s": percentiles(latencies),
        "rate_per_s": rate,
        "images_per_s": queries / (clock() - start),
        "mean_batch": sum(batches) / len(batches),
    }


def arrivals(queries: int, rate: float, seed: int) -> np.ndarray:
    """Times of arrival in s, shape (queries,), of a Poisson process: gaps are exponential with mean 1/rate."""
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, queries))


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90, p95, p99 (nearest rank from above, as MLPerf's LoadGen), mean and max."""
    found = {f"p{p}": float(np.percentile(values, p, method="higher")) for p in PERCENTILES}
    return found | {"mean": float(np.mean(values)), "max": float(np.max(values))}


# --- Prompts and quality --------------------------------------------------------------------------------------------


def prompts_for(model: str, queries: int, seed: int) -> list[str]:
    """The demo model's unseen prompts, or captions in turn."""
    if model == "demo":
        return list(fidelity.unseen_prompts(queries, seed))
    return [CAPTIONS[i % len(CAPTIONS)] for i in range(queries)]


def quality(model: str, prompts: Sequence[str], images: dict[int, np.ndarray]) -> dict[str, Any]:
    """Scores of the pictures drawn; for each that cannot be computed here, the reason instead of a number."""
    drawn = [images[i] for i in range(len(prompts))]
    shares: dict[str, Any] = {"fidelity_percent": "only the demo model's pictures can be read back"}
    if model == "demo":
        shares["fidelity_percent"] = 100 * fidelity.score(prompts, drawn).share
    return shares | {"clip_score": clip_score(prompts, drawn), "fid": _no_fid()}


def clip_score(prompts: Sequence[str], images: Sequence[np.ndarray]) -> float | str:
    """Mean CLIP score (100 x cosine, ViT-B/16) by torchmetrics, or why there is none."""
    if importlib.util.find_spec("torchmetrics") is None:
        return "torchmetrics is not installed"
    import torch
    from torchmetrics.functional.multimodal import clip_score as score

    try:
        tensors = [torch.from_numpy(image.copy()).permute(2, 0, 1) for image in images]
        return float(score(tensors, list(prompts), "openai/clip-vit-base-patch16"))
    except Exception as error:  # the hub's errors for weights that are not here
        return f"no CLIP weights: {type(error).__name__}"


def _no_fid() -> str:
    """FID compares thousands of pictures with as many photographs: neither the set nor Inception's weights are here."""
    if importlib.util.find_spec("torchmetrics") is None:
        return "torchmetrics is not installed"
    return "no reference pictures: MLPerf takes 5000 of COCO's validation set"


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
