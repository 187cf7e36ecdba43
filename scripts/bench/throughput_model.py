"""Model of throughput on several GPUs from four times measured with one replica; nothing is fitted on several GPUs.

Replicas share only the front process, which hands out batches and builds the responses. A replica requests a batch,
waits until it is served, generates, and requests again: a closed queue with one server (the machine repairman problem).
Mean values are computed exactly, by increasing the number of replicas one by one (Reiser and Lavenberg, 1980).

One image on two GPUs is simpler: each GPU computes one batch row of guidance at every step, and they exchange it.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class ReplicaTimes:
    """Times in seconds, measured with one replica.

    generate: from the start of a batch until its files have arrived.
    hand_over: from then until the start of the next batch.
    dispatch: CPU time of the front process to queue one image and hand it out.
    respond: CPU time of the front process to build the HTTP response of one image.
    batch: images per batch.
    """

    generate: float
    hand_over: float
    dispatch: float
    respond: float
    batch: int = 1

    def images_a_second(self, replicas: int, *, hosts: int = 1, http: bool = True) -> float:
        """Return the throughput of `replicas` on each of `hosts`, with one front process per host.

        http: the front process builds responses.
        """
        service = self.batch * (self.dispatch + (self.respond if http else 0.0))
        outside = self.generate + max(0.0, self.hand_over - self.batch * self.dispatch)
        rate = queue_length = 0.0
        for count in range(1, replicas + 1):
            residence = service * (1 + queue_length)
            rate = count / (residence + outside)
            queue_length = rate * residence
        return hosts * self.batch * rate

    def limit(self) -> float:
        """Return the images per second of one host with unlimited replicas: the limit of its front process."""
        return 1 / (self.dispatch + self.respond)


def poisson_latency(service: float, replicas: int, rate: float, images: int, percentile: float = 99) -> float:
    """Return a percentile of the seconds from arrival to answer of `images`, which arrive at random, `rate` a second.

    Each replica generates one image at a time in `service` seconds, the longest waiting first: an M/D/c queue that
    begins empty. The result is the mean of 100,000 images in simulated runs, with a fixed seed.
    """
    random, percentiles = np.random.default_rng(0), []
    for _ in range(max(1, 100_000 // images)):
        free = [0.0] * replicas  # when each replica is idle again
        latencies = []
        for arrival in np.cumsum(random.exponential(1 / rate, images)).tolist():
            end = max(arrival, free[0]) + service
            heapq.heapreplace(free, end)
            latencies.append(end - arrival)
        percentiles.append(np.percentile(latencies, percentile))
    return float(np.mean(percentiles))


def poisson_load(service: float, replicas: int, latency: float, percentile: float = 99) -> float:
    """Return the largest share of the replicas' throughput at which `poisson_latency` is at most `latency`."""
    low, high = 0.0, 1.0
    for _ in range(8):
        share = (low + high) / 2
        rate = share * replicas / service
        is_enough = poisson_latency(service, replicas, rate, 50_000, percentile) <= latency
        low, high = (share, high) if is_enough else (low, share)
    return low


def overlapped_decoding(image: float, latents: float) -> float:
    """Return the seconds of an image among many, if another device decodes it while the next one's latents are sampled.

    image, latents: seconds of an image on one device, and of its latents alone.
    """
    return max(latents, image - latents)


def split_step(rows: Sequence[float], exchange: float) -> float:
    """Return the seconds of a step that computes each batch row on its own device and then exchanges the rows."""
    return max(rows) + exchange


def split_image(image: float, step: float, steps: int, split: float) -> float:
    """Return the seconds of an image whose steps take `split` instead of `step` seconds; the rest is unchanged."""
    return image - steps * (step - split)


# --- Results --------------------------------------------------------------------------------------------------------


def replica_times(row: dict[str, Any]) -> ReplicaTimes:
    """Return the times in the row of one replica in a result of scripts/bench/scale_gpus.py.

    Times that older files lack are 0.
    """
    batches = [row["batch"] / images_s for images_s in row["images_s"]["values"]]  # seconds per batch
    return ReplicaTimes(
        generate=row["batch_s"]["mean"],
        hand_over=max(0.0, sum(batches) / len(batches) - row["batch_s"]["mean"]),
        dispatch=row.get("dispatch_s", 0.0),
        respond=row.get("front_s", 0.0),
        batch=row["batch"],
    )


def compare_throughput(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the measured and the modeled images per second for each row of several replicas."""
    comparisons = []
    for one in (row for row in rows if row["replicas"] == 1):
        for row in (row for row in rows if row["replicas"] > 1 and row["batch"] == one["batch"]):
            images_s, model = row["images_s"]["mean"], replica_times(one).images_a_second(row["replicas"], http=False)
            comparisons.append({"replicas": row["replicas"], "batch": row["batch"], "measured_images_s": images_s,
                         "model_images_s": model, "error_percent": 100 * (model / images_s - 1)})  # fmt: skip
    return comparisons


def compare_split(result: Mapping[str, Any], steps: int) -> dict[str, tuple[float, float]]:
    """Return measured and modeled seconds on two GPUs by quantity, for the result of a preset in two_gpus.json."""
    one, two = (result["step_ms"][name] / 1e3 for name in ("one", "two"))
    rows = [result["unet_ms"][row] / 1e3 for row in ("negative row", "positive row")]
    step = split_step(rows, result["exchange_us"] / 1e6)
    image = split_image(result["image_s"]["one"], one, steps, step)
    return {"a step": (two, step), f"an image of {steps} steps": (result["image_s"]["two"], image)}
