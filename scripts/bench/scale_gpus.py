"""Data parallel on 1 to N GPUs: images a second, seconds of a batch, and what of N times one GPU is reached.

    scale_gpus.py FOLDER --gpus 2 --provider cuda                 replicas in Ray's actors, as `sd-ort serve` has them
    scale_gpus.py FOLDER --gpus 2 --provider cuda --without-ray   the same replicas in plain processes, one a GPU
    scale_gpus.py FOLDER --replicas 2                             a dry run on the CPU, whose replicas share its cores
    scale_gpus.py --check results/serving/scale_*_h200x2.json     the model beside results that are there

All replicas are loaded once; rounds of 1, 2, ... of them take turns, each of as many images a replica, and a speed-up
is the ratio within a round. Images are drawn, decoded and compressed as PNG files, handed out by the dispatcher.

Beside each number of replicas stands what `sd_ort.serving.scaling` makes of the times of one, and at the end what it
makes of 8 GPUs and of 8 hosts with them, which nobody measured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from sd_ort.core import files, metrics
from sd_ort.core.errors import SdOrtError
from sd_ort.runtime import machine
from sd_ort.serving import api, scaling
from sd_ort.serving import replica as here
from sd_ort.serving.dispatch import Dispatcher, ReplicaProcess
from sd_ort.serving.image_jobs import BatchSettings, ImageJob, ModelInfo

GOAL = 1.9  # times one GPU's images a second, on two
actor = here.Actor()  # of a process of `PlainReplica`


def call(method: str, argument: Any) -> Any:
    """In a replica's process: what its actor answers."""
    return getattr(actor, method)(argument)


class PlainReplica:
    """A replica in a process of its own without Ray: see `dispatch.ReplicaProcess`."""

    def __init__(self, opening: here.ReplicaConfig, name: str) -> None:
        self.opening, self.name = opening, name
        self.pool = ProcessPoolExecutor(1, get_context("spawn"))

    async def start(self) -> ModelInfo:
        return self._checked(await asyncio.wrap_future(self.pool.submit(call, "load", self.opening)))

    async def generate(self, jobs: Sequence[ImageJob]) -> list[bytes]:
        return self._checked(await asyncio.wrap_future(self.pool.submit(call, "generate", jobs)))

    def stop(self) -> None:
        self.pool.shutdown(cancel_futures=True)

    def is_alive(self) -> bool:
        return True

    @staticmethod
    def _checked(result: Any) -> Any:
        if isinstance(result, here.RemoteError):
            raise result.error()
        return result


@dataclass
class Loaded:
    """A replica that stays loaded from one dispatcher to the next; `seconds` of each batch it drew."""

    name: str
    replica: ReplicaProcess
    model: ModelInfo
    seconds: list[float] = field(default_factory=list)

    async def start(self) -> ModelInfo:
        return self.model

    async def generate(self, jobs: Sequence[ImageJob]) -> list[bytes]:
        start = time.perf_counter()
        files = await self.replica.generate(jobs)
        self.seconds.append(time.perf_counter() - start)
        return files

    def stop(self) -> None:
        pass

    def is_alive(self) -> bool:
        return True


@contextlib.contextmanager
def replicas_of(openings: Sequence[here.ReplicaConfig], *, ray: bool) -> Iterator[Sequence[ReplicaProcess]]:
    """The replicas, not yet loaded, ended on leaving."""
    if ray:
        from sd_ort.serving.ray_replicas import RayCluster

        with RayCluster(openings) as cluster:
            yield cluster.replicas
        return
    plain = [PlainReplica(opening, str(place)) for place, opening in enumerate(openings)]
    try:
        yield plain
    finally:
        for each in plain:
            each.stop()


async def images_a_second(replicas: Sequence[ReplicaProcess], pictures: Sequence[ImageJob], batch: int) -> float:
    """All pictures submitted at once, drawn by these replicas alone."""
    dispatcher = Dispatcher(replicas, batch)
    await dispatcher.start()
    start = time.perf_counter()
    await asyncio.gather(*dispatcher.submit(pictures))
    seconds = time.perf_counter() - start
    if dispatcher.counts.restarts:
        raise SdOrtError("a replica died: nothing was measured.")
    dispatcher.close()
    return len(pictures) / seconds


def front_seconds(pictures: Sequence[ImageJob], files: Sequence[bytes], times: int = 20) -> float:
    """CPU seconds an image in which the one process in front of all replicas makes its answer."""
    start = time.process_time()
    for _ in range(times):
        json.dumps(api.response_body(pictures, files)).encode()
    return (time.process_time() - start) / (times * len(pictures))


@dataclass
class Instant:
    """A replica that draws in no time."""

    name: str = "instant"

    async def start(self) -> ModelInfo:
        return ModelInfo(default_size=64, size_multiple=8, steps=1, guidance=1.0, train_timesteps=1)

    async def generate(self, jobs: Sequence[ImageJob]) -> list[bytes]:
        await asyncio.sleep(0)
        return [b""] * len(jobs)

    def stop(self) -> None:
        pass

    def is_alive(self) -> bool:
        return True


async def dispatch_seconds(settings: BatchSettings, replicas: int, batch: int, images: int = 2000) -> float:
    """CPU seconds an image in which the dispatcher queues it and hands it out."""
    dispatcher = Dispatcher([Instant() for _ in range(replicas)], batch)
    await dispatcher.start()
    start = time.process_time()
    for first in range(0, images, 2 * batch * replicas):  # as many as wait beside those that are drawn
        pictures = [ImageJob("", "", seed, settings) for seed in range(first, first + 2 * batch * replicas)]
        await asyncio.gather(*dispatcher.submit(pictures))
    seconds = time.process_time() - start
    dispatcher.close()
    return seconds / images


def say_model(report: Mapping[str, Any]) -> None:
    """Print the check, and the model of more GPUs; `report`: ours, or results/two_gpus.json."""
    for name, found in report.get("presets", {}).items():
        for what, (measured_s, model_s) in scaling.compare_split(found, report["settings"]["steps"]).items():
            print(
                f"{name}, guidance split, {what}: measured {1e3 * measured_s:.2f} ms, the model says "
                f"{1e3 * model_s:.2f} ({100 * (model_s / measured_s - 1):+.1f} %)"
            )
    rows = report.get("rows", [])
    if "dry run" in report.get("devices", ""):
        print("replicas that share one device: the model is of replicas that do not")
        return
    for row in scaling.compare_throughput(rows):
        print(
            f"batch {row['batch']}, {row['replicas']} replicas: measured {row['measured_images_s']:.3f} images/s, the "
            f"model says {row['model_images_s']:.3f} ({row['error_percent']:+.1f} %)"
        )
    for one in (row for row in rows if row["replicas"] == 1):
        times = scaling.replica_times(one)
        print(
            f"batch {one['batch']}, one replica: {times.generate:.4f} s a batch, {1e3 * times.hand_over:.2f} ms to the "
            f"next; in front {1e3 * times.dispatch:.3f} + {1e3 * times.respond:.3f} ms an image"
        )
        if times.dispatch:
            print(
                f"not measured, with HTTP: 8 GPUs {times.images_a_second(8):.2f} images/s, 8 such hosts "
                f"{times.images_a_second(8, hosts=8):.1f}; one host's limit {times.limit():.0f}"
            )


async def measured(
    replicas: Sequence[ReplicaProcess], options: argparse.Namespace, settings: BatchSettings
) -> list[dict[str, Any]]:
    """One row for each batch size and number of replicas."""
    models = await asyncio.gather(*(replica.start() for replica in replicas))
    loaded = [Loaded(replica.name, replica, model) for replica, model in zip(replicas, models, strict=True)]
    rows = []
    for batch in options.batch:
        each = -(-options.images // batch) * batch  # images of a replica
        pictures = [ImageJob(options.prompt, "", seed, settings) for seed in range(each * len(loaded))]
        await asyncio.gather(*(one.generate(pictures[:batch]) for one in loaded for _ in range(options.warm_up)))
        files = await loaded[0].generate(pictures[:batch])
        front = front_seconds(pictures[:batch], files)
        dispatch = await dispatch_seconds(settings, len(loaded), batch)
        print(
            f"an image of {len(files[0]) / 1e6:.2f} MB takes {1e3 * front:.1f} ms of the process in front", flush=True
        )
        speeds: dict[int, list[float]] = {count: [] for count in range(1, len(loaded) + 1)}
        latencies: dict[int, list[float]] = {count: [] for count in speeds}
        for _ in range(options.rounds):
            for count in speeds:
                for one in loaded:
                    one.seconds.clear()
                speeds[count].append(await images_a_second(loaded[:count], pictures[: each * count], batch))
                latencies[count] += [seconds for one in loaded for seconds in one.seconds]
        for count in speeds:
            ratios = [more / one for more, one in zip(speeds[count], speeds[1], strict=True)]
            row = {
                "replicas": count, "batch": batch, "images_a_round": each * count,
                "images_s": metrics.summary(speeds[count]), "batch_s": metrics.summary(latencies[count]),
                "image_MB": len(files[0]) / 1e6, "front_s": front, "dispatch_s": dispatch,
                "speedup": metrics.summary(ratios), "efficiency": median(ratios) / count,
            }  # fmt: skip
            rows.append(row)
            print(f"batch {batch}, {count} replicas: {median(speeds[count]):.3f} images/s,", end=" ")
            print(f"{median(latencies[count]):.3f} s a batch, {median(ratios):.2f} times one", flush=True)
    return rows


def main() -> int:
    """Command line; returns the exit code: 1 where two GPUs miss the goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="pipeline folder")
    parser.add_argument(
        "--check", type=Path, nargs="+", help="only print the model beside these results, or two_gpus.json"
    )
    parser.add_argument("--gpus", type=int, help="a replica on each of so many GPUs")
    parser.add_argument("--replicas", type=int, help="so many on the CPU: a dry run")
    parser.add_argument("--provider", default="cpu", help="execution provider (cpu)")
    parser.add_argument("--without-ray", action="store_true", help="plain processes instead of Ray's actors")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4], help="images drawn at once (1 4)")
    parser.add_argument("--images", type=int, default=16, help="images of a replica in a round (16)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (3)")
    parser.add_argument("--warm-up", type=int, default=2, help="batches of each size before the rounds (2)")
    parser.add_argument("--side", type=int, help="pixels (the model's)")
    parser.add_argument("--steps", type=int, default=25, help="denoising steps (25)")
    parser.add_argument("--guidance", type=float, default=7.5, help="guidance scale (7.5)")
    parser.add_argument("--prompt", default="a red circle on a blue background", help="what to draw")
    parser.add_argument("--out", type=Path, help="the result, JSON")
    options = parser.parse_args()
    if options.check:
        for path in options.check:
            print(path)
            say_model(files.read_json(path))
        return 0
    if options.folder is None:
        parser.error("give a pipeline folder")

    opening = here.ReplicaConfig(options.folder, {"provider": options.provider})
    openings = here.replica_configs(opening, options.gpus, options.replicas, None)
    settings = BatchSettings(options.side, options.side, options.steps, options.guidance)
    with replicas_of(openings, ray=not options.without_ray) as replicas:
        rows = asyncio.run(measured(replicas, options, settings))
    report = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["scripts/bench/scale_gpus.py", *sys.argv[1:]]),
        "commit": machine.commit(),
        "machine": machine.machine(),
        "versions": machine.versions(),
        "processes": "plain, without Ray" if options.without_ray else "Ray's actors",
        "devices": f"{options.gpus} GPUs"
        if options.gpus
        else f"{len(openings)} replicas that share one device: a dry run",
        "model": str(options.folder),
        "rows": rows,
        "model_check": scaling.compare_throughput(rows),
    }
    say_model(report)
    if options.out:
        files.write_json(options.out, report)
    missed = [row for row in rows if options.gpus and row["replicas"] == 2 and row["speedup"]["median"] < GOAL]
    if options.gpus and options.gpus > 1:
        print(f"goal of {GOAL} times one GPU: {'missed' if missed else 'reached'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
