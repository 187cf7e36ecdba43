"""MLPerf's loads and scores."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sd_ort.benchmark import mlperf
from sd_ort.demo import scenes

Cli = Callable[..., tuple[int, str, str]]


class Clock:
    """Time that passes only while somebody sleeps or draws; a batch takes `fixed` and `each` an image."""

    def __init__(self, fixed: float, each: float) -> None:
        self.now, self.fixed, self.each = 100.0, fixed, each
        self.batches: list[list[int]] = []

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds

    def draw(self, numbers: Any) -> None:
        self.batches.append(list(numbers))
        self.now += self.fixed + self.each * len(numbers)


def serve(clock: Clock, queries: int, batch: int, rate: float) -> dict[str, Any]:
    return mlperf.server(clock.draw, queries, batch, rate, 0, lambda: clock.now, clock.sleep)


def test_server_draws_what_waits_together() -> None:
    idle = Clock(0.001, 0)
    result = serve(idle, 200, 4, rate=1.0)
    assert [n for batch in idle.batches for n in batch] == list(range(200))
    assert result["latency_s"]["p50"] == pytest.approx(0.001)
    assert result["mean_batch"] == pytest.approx(1, abs=0.02)

    busy = Clock(1.0, 0)
    result = serve(busy, 200, 4, rate=3.0)  # four a second at most, three arrive: a queue, but a bounded one
    assert max(map(len, busy.batches)) == 4
    assert result["mean_batch"] > 2
    assert 1 < result["latency_s"]["p50"] < 10

    flooded = Clock(1.0, 0)
    assert serve(flooded, 200, 4, rate=40.0)["latency_s"]["p99"] > 40
    assert len(flooded.batches) == pytest.approx(50, abs=2)


def test_arrivals_are_poisson() -> None:
    gaps = np.diff(mlperf.arrivals(20_000, 5.0, 0))
    assert gaps.mean() == pytest.approx(1 / 5, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 5, rel=0.03)  # exponential: as large as the mean
    assert (mlperf.arrivals(10, 5.0, 1) == mlperf.arrivals(10, 5.0, 1)).all()


def test_percentiles_are_measured_values() -> None:
    assert mlperf.percentiles(range(1, 101))["p99"] == 100
    assert mlperf.percentiles([1.0, 2.0])["p50"] == 2.0


def test_scores_that_cannot_be_had_say_why() -> None:
    image = np.zeros((128, 128, 3), np.uint8)
    scores = mlperf.quality("sd15", ["a dog"], {0: image})
    assert "demo" in scores["fidelity_percent"]
    assert isinstance(scores["fid"], str)
    assert mlperf.quality("demo", scenes.unseen_prompts(1), {0: image})["fidelity_percent"] == 0.0


SMALL = ("--torch", "none", "--steps", 1, "--height", 64, "--width", 64, "--threads", 1)


def test_mlperf_of_a_tiny_model(sd_ort: Cli, tiny_export: Path, tmp_path: Path) -> None:
    loads = ("--mlperf", "--queries", 3, "--load", 0.5, "--batch", "1,2")
    code, table, _ = sd_ort("benchmark", tiny_export, *loads, *SMALL, "--out", tmp_path)
    assert code == 0
    report = json.loads((tmp_path / "mlperf.json").read_text())
    (row,) = report["engines"]
    assert row["status"] == "ok"
    assert row["Offline"]["batch"] == 2
    assert row["Offline"]["images_per_s"] == pytest.approx(3 / row["Offline"]["seconds"])
    assert row["Server"]["rate_per_s"] == pytest.approx(row["Offline"]["images_per_s"] / 2)
    for name in ("SingleStream", "Server"):
        assert 0 < row[name]["latency_s"]["p50"] <= row[name]["latency_s"]["p99"] <= row[name]["latency_s"]["max"]
    assert "not an official MLPerf result" in table
    assert "SingleStream" in (tmp_path / "report.html").read_text()
