"""The throughput model against measurements on two GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.bench.throughput_model import (
    ReplicaTimes,
    compare_split,
    compare_throughput,
    overlapped_decoding,
    poisson_latency,
    poisson_load,
)

ROOT = Path(__file__).resolve().parents[2]


def test_limits_of_the_model() -> None:
    """One replica has the measured rate; many are limited by the front process; hosts add up."""
    times = ReplicaTimes(generate=0.9, hand_over=0.1, dispatch=0.01, respond=0.04)
    assert times.images_a_second(1, http=False) == pytest.approx(1.0)
    assert times.images_a_second(1) == pytest.approx(1 / 1.04)
    assert times.images_a_second(1000) == pytest.approx(times.limit()) == pytest.approx(20)
    assert times.images_a_second(8, hosts=3) == pytest.approx(3 * times.images_a_second(8))
    assert times.images_a_second(8) < 8 * times.images_a_second(1)
    rates = [times.images_a_second(count) for count in range(1, 40)]
    assert rates == sorted(rates)
    free = ReplicaTimes(generate=2.0, hand_over=0.0, dispatch=0.0, respond=0.0, batch=4)
    assert free.images_a_second(8) == pytest.approx(16)


def test_two_replicas_by_hand() -> None:
    """Two replicas that generate for 1 s and are served for 1 s: R(2) = 1 + Q(1) = 1.5, so 2 / 2.5 batches a second."""
    assert ReplicaTimes(generate=1.0, hand_over=0.0, dispatch=0.0, respond=1.0).images_a_second(2) == pytest.approx(0.8)


@pytest.mark.parametrize("name", ["scale_sd15_h200x2", "scale_sdxl_h200x2", "ray_sd15_h100x2", "ray_sdxl_h100x2"])
def test_two_gpus_are_predicted_from_one(name: str) -> None:
    rows = json.loads((ROOT / "results" / "serving" / f"{name}.json").read_text())["rows"]
    (check,) = compare_throughput(rows)
    assert check["replicas"] == 2
    assert abs(check["error_percent"]) < 3


def test_a_split_image_is_predicted_from_its_batch_rows() -> None:
    measured = json.loads((ROOT / "results" / "two_gpus.json").read_text())
    result, steps = measured["presets"]["sdxl"], measured["settings"]["steps"]
    for seconds, model in compare_split(result, steps).values():
        assert model == pytest.approx(seconds, rel=0.03)


def test_random_arrivals() -> None:
    """Mean wait of an M/D/1 queue: load / (2 (1 - load)) services (Pollaczek and Khinchine); no wait without load."""
    latencies = [poisson_latency(2.0, 1, 0.25, 20_000, percentile) for percentile in range(5, 100, 10)]
    assert sum(latencies) / len(latencies) == pytest.approx(2.0 + 2.0 * 0.5, rel=0.1)
    assert poisson_latency(2.0, 2, 1e-6, 1000) == pytest.approx(2.0)
    assert poisson_latency(1.0, 2, 1.6, 20) < poisson_latency(1.0, 2, 1.6, 20_000), "a short run begins without a queue"
    assert 0.05 < poisson_load(1.0, 2, 1.3) < 0.2


def test_decoding_elsewhere_hides_the_shorter_part() -> None:
    assert overlapped_decoding(1.0, 0.9) == pytest.approx(0.9)
    assert overlapped_decoding(1.0, 0.4) == pytest.approx(0.6)
