"""Several GPUs: replicas through Ray, one that is killed, MLPerf's LoadGen, and one image on two GPUs.

    scale_gpus.py FOLDER --gpus 2 --provider sdcuda               all stages, a replica on each GPU
    scale_gpus.py FOLDER --replicas 2                             a dry run on the CPU, whose replicas share its cores
    scale_gpus.py FOLDER --make sdxl                              make FOLDER first: random weights, optimized
    scale_gpus.py WORK --presets sd15 sdxl --gpus 4 --provider sdcuda --out results/serving
                                                                  make and measure these, and write the page
    scale_gpus.py WORK --presets demo --replicas 2 --out WORK     its dry run
    scale_gpus.py FOLDER --gpus 2 --provider cuda --without-ray --stages scale     replicas in plain processes
    scale_gpus.py --check results/serving/scale_*_h200x2.json     the model beside results that are there
    scale_gpus.py --page results/serving/ray_*.json --out results/serving/ray.md   a page of results

Stages, after each of which the JSON file is written; one that fails says why and the others go on:

    scale    rounds of 1, 2, 4, ... replicas take turns, each of as many images a replica; a speed-up is the ratio
             within a round. Images are PNG files, handed out by the dispatcher. Latencies, CPU time and memory
    kill     the process of a replica is killed under load: every image must come, with the bytes it has without
    loadgen  MLPerf's scenarios on 1 and on all replicas; Server at 80 % of Offline's rate, and at the load that the
             model says to keep the 99th percentile at `LATENCY_GOAL` times a call
    split    guidance split between two GPUs, and decoding on the other one (scripts/bench/two_gpus.py)

Beside each number stands what `scripts.bench.throughput_model` makes of the times of one replica.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil

from scripts.bench import throughput_model
from sd_ort.benchmark import loadgen, mlperf
from sd_ort.benchmark.engines.interface import BenchmarkSettings
from sd_ort.benchmark.replicas import ReplicaBackend
from sd_ort.core import files, metrics
from sd_ort.core.errors import SdOrtError, first_line
from sd_ort.runtime import device_meters, machine
from sd_ort.serving import api
from sd_ort.serving import replica as here
from sd_ort.serving.dispatch import Dispatcher, ReplicaProcess
from sd_ort.serving.image_jobs import BatchSettings, ImageJob, ModelInfo, ReplicaDied

GOALS = {2: 1.95, 4: 3.85, 8: 7.6}  # times one GPU's images a second
LATENCY_GOAL = 1.3  # times a call: 99th percentile under load
SERVER_SECONDS, SERVER_QUERIES = 40, 100  # at most, in LoadGen's Server scenario
SERVER_LOAD = 0.8  # of Offline's rate
SUSTAINED_PERCENTILE = 99.5  # by which the model chooses the sustained load: a run has too few images for the 99th
# What `--presets` measures of each.
PRESETS = {
    "sd15": "--side 512 --steps 25 --images 24 --queries 80",
    "sdxl": "--side 1024 --steps 20 --guidance 8 --images 6 --queries 24",
    "demo": "--side 64 --steps 2 --images 2 --queries 8 --rounds 2 --warm-up 1 --compared 2",
}
STAGES = ("scale", "kill", "loadgen", "split")
actor = here.Actor()  # of a process of `SpawnedReplica`


def call(method: str, argument: Any) -> Any:
    """In a replica's process: what its actor answers."""
    return getattr(actor, method)(argument)


class SpawnedReplica:
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
    """A replica that stays loaded from one dispatcher to the next, and is loaded again after its process died.

    `seconds` of each batch it drew.
    """

    name: str
    replica: ReplicaProcess
    model: ModelInfo
    seconds: list[float] = field(default_factory=list)
    died: bool = False

    async def start(self) -> ModelInfo:
        if self.died:
            self.replica.stop()
            self.model, self.died = await self.replica.start(), False
        return self.model

    async def generate(self, jobs: Sequence[ImageJob]) -> list[bytes]:
        start = time.perf_counter()
        try:
            files = await self.replica.generate(jobs)
        except ReplicaDied:
            self.died = True
            raise
        self.seconds.append(time.perf_counter() - start)
        return files

    def stop(self) -> None:
        pass

    def is_alive(self) -> bool:
        return self.replica.is_alive()


async def load(replicas: Sequence[ReplicaProcess]) -> list[Loaded]:
    """Load all replicas at once."""
    models = await asyncio.gather(*(replica.start() for replica in replicas))
    return [Loaded(replica.name, replica, model) for replica, model in zip(replicas, models, strict=True)]


@contextlib.contextmanager
def replicas_of(openings: Sequence[here.ReplicaConfig], *, ray: bool) -> Iterator[Sequence[ReplicaProcess]]:
    """The replicas, not yet loaded, ended on leaving."""
    if ray:
        from sd_ort.serving.ray_replicas import RayCluster

        with RayCluster(openings) as cluster:
            yield cluster.replicas
        return
    plain = [SpawnedReplica(opening, str(index)) for index, opening in enumerate(openings)]
    try:
        yield plain
    finally:
        for each in plain:
            each.stop()


async def images_a_second(replicas: Sequence[ReplicaProcess], jobs: Sequence[ImageJob], batch: int) -> float:
    """All pictures submitted at once, generated by these replicas alone."""
    dispatcher = Dispatcher(replicas, batch)
    await dispatcher.start()
    start = time.perf_counter()
    await asyncio.gather(*dispatcher.submit(jobs))
    seconds = time.perf_counter() - start
    if dispatcher.counts.restarts:
        raise SdOrtError("a replica died: nothing was measured.")
    dispatcher.close()
    return len(jobs) / seconds


def front_seconds(jobs: Sequence[ImageJob], files: Sequence[bytes]) -> float:
    """CPU seconds an image in which the one process in front of all replicas makes its answer."""
    times, start = 20, time.process_time()
    for _ in range(times):
        json.dumps(api.response_body(jobs, files)).encode()
    return (time.process_time() - start) / (times * len(jobs))


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
    for first in range(0, images, 2 * batch * replicas):  # as many as wait beside those in work
        jobs = [ImageJob("", "", seed, settings) for seed in range(first, first + 2 * batch * replicas)]
        await asyncio.gather(*dispatcher.submit(jobs))
    seconds = time.process_time() - start
    dispatcher.close()
    return seconds / images


def print_model(report: Mapping[str, Any]) -> None:
    """Print the check, and the model of more GPUs; `report`: ours, or results/two_gpus.json."""
    for name, preset in report.get("presets", {}).items():
        for what, (measured_s, model_s) in throughput_model.compare_split(preset, report["settings"]["steps"]).items():
            print(
                f"{name}, guidance split, {what}: measured {1e3 * measured_s:.2f} ms, the model says "
                f"{1e3 * model_s:.2f} ({100 * (model_s / measured_s - 1):+.1f} %)"
            )
    rows = report.get("rows", [])
    if "dry run" in report.get("devices", ""):
        print("replicas that share one device: the model is of replicas that do not")
        return
    for row in throughput_model.compare_throughput(rows):
        print(
            f"batch {row['batch']}, {row['replicas']} replicas: measured {row['measured_images_s']:.3f} images/s, the "
            f"model says {row['model_images_s']:.3f} ({row['error_percent']:+.1f} %)"
        )
    for one in (row for row in rows if row["replicas"] == 1):
        times = throughput_model.replica_times(one)
        print(
            f"batch {one['batch']}, one replica: {times.generate:.4f} s a batch, {1e3 * times.hand_over:.2f} ms to the "
            f"next; in front {1e3 * times.dispatch:.3f} + {1e3 * times.respond:.3f} ms an image"
        )
        if times.dispatch:
            print(
                f"not measured, with HTTP: 8 GPUs {times.images_a_second(8):.2f} images/s, 8 such hosts "
                f"{times.images_a_second(8, hosts=8):.1f}; one host's limit {times.limit():.0f}"
            )


@dataclass(frozen=True)
class Usage:
    """CPU seconds and memory in MB by the part of a process in the work: front, Ray's own processes, replicas."""

    cpu: dict[str, float]
    memory: dict[str, float]


def usage(loaded: Sequence[Loaded]) -> Usage:
    """Return what the processes of this one used by now."""
    replicas = {each.model.pid for each in loaded}
    cpu = dict.fromkeys(("front", "ray", "replicas"), 0.0)
    memory = dict(cpu)
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        part = "front" if process.pid == os.getpid() else "replicas" if process.pid in replicas else "ray"
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            cpu[part] += times.user + times.system
            memory[part] += process.memory_full_info().uss / 1e6
    return Usage(cpu, memory)


def device_memory(loaded: Sequence[Loaded]) -> list[float | None]:
    """Return the MB of each GPU that its replica has in use; [] where NVML is not there."""
    try:
        return [device_meters.Nvml(index).used_MB(each.model.pid) for index, each in enumerate(loaded)]
    except OSError:
        return []


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return p50 and p99."""
    return {f"p{percentile}": float(np.percentile(seconds, percentile)) for percentile in (50, 99)}


async def measured(
    loaded: Sequence[Loaded], options: argparse.Namespace, settings: BatchSettings
) -> list[dict[str, Any]]:
    """One row for each batch size and number of replicas."""
    rows = []
    for batch in options.batch:
        each = -(-options.images // batch) * batch  # images of a replica
        jobs = [ImageJob(options.prompt, "", seed, settings) for seed in range(each * len(loaded))]
        for _ in range(options.warm_up):
            await asyncio.gather(*(one.generate(jobs[:batch]) for one in loaded))
        files = await loaded[0].generate(jobs[:batch])
        front = front_seconds(jobs[:batch], files)
        dispatch = await dispatch_seconds(settings, len(loaded), batch)
        print(
            f"an image of {len(files[0]) / 1e6:.2f} MB takes {1e3 * front:.1f} ms of the process in front", flush=True
        )
        replicas = len(loaded)
        counts = sorted({*(count for count in (1, 2, 4, 8) if count <= replicas), replicas})
        speeds: dict[int, list[float]] = {count: [] for count in counts}
        latencies: dict[int, list[float]] = {count: [] for count in counts}
        cpu: dict[int, list[dict[str, float]]] = {count: [] for count in counts}
        for _ in range(options.rounds):
            for count in counts:
                for one in loaded:
                    one.seconds.clear()
                before = usage(loaded).cpu
                speeds[count].append(await images_a_second(loaded[:count], jobs[: each * count], batch))
                after = usage(loaded).cpu
                cpu[count].append({part: (after[part] - before[part]) / (each * count) for part in after})
                latencies[count] += [seconds for one in loaded for seconds in one.seconds]
        for count in counts:
            ratios = [more / one for more, one in zip(speeds[count], speeds[1], strict=True)]
            row = {
                "replicas": count, "batch": batch, "images_a_round": each * count,
                "images_s": metrics.summary(speeds[count]), "batch_s": metrics.summary(latencies[count]),
                "latency_s": percentiles(latencies[count]),
                "latency_p99_times_call": percentiles(latencies[count])["p99"] / median(latencies[1]),
                "cpu_s_an_image": {part: median(each[part] for each in cpu[count]) for part in cpu[count][0]},
                "image_MB": len(files[0]) / 1e6, "front_s": front, "dispatch_s": dispatch,
                "speedup": metrics.summary(ratios), "efficiency": median(ratios) / count,
            }  # fmt: skip
            rows.append(row)
            print(f"batch {batch}, {count} replicas: {median(speeds[count]):.3f} images/s,", end=" ")
            print(f"{median(latencies[count]):.3f} s a batch, {median(ratios):.2f} times one", flush=True)
    return rows


async def killed(loaded: Sequence[Loaded], options: argparse.Namespace, settings: BatchSettings) -> dict[str, Any]:
    """Kill the first replica after a third of the images. Return how many came, and how many have other bytes."""
    jobs = [ImageJob(options.prompt, "", seed, settings) for seed in range(options.images * len(loaded))]
    expected = [(await loaded[-1].generate([job]))[0] for job in jobs[: options.compared]]
    dispatcher = Dispatcher(loaded, 1)
    await dispatcher.start()
    start = time.perf_counter()
    futures = dispatcher.submit(jobs)
    await asyncio.gather(*futures[: len(jobs) // 3])
    pid = loaded[0].model.pid
    os.kill(pid, signal.SIGKILL)
    results = await asyncio.gather(*futures, return_exceptions=True)
    seconds = time.perf_counter() - start
    while dispatcher.ready < len(loaded):
        await asyncio.sleep(0.1)
    restored = time.perf_counter() - start
    dispatcher.close()
    lost = [str(result) for result in results if isinstance(result, BaseException)]
    return {
        "images": len(jobs), "lost": lost, "restarts": dispatcher.counts.restarts, "seconds": seconds,
        "seconds_until_all_replicas_are_ready": restored, "compared": len(expected),
        "differing": sum(result != file for result, file in zip(results, expected, strict=False)),
        "process": [pid, loaded[0].model.pid],
    }  # fmt: skip


def with_loadgen(
    loaded: Sequence[Loaded], options: argparse.Namespace, settings: BatchSettings
) -> list[dict[str, Any]]:
    """MLPerf's scenarios, one image at a time on each replica, on one replica and on all."""
    queries = options.queries
    prompts = mlperf.prompts_for("", queries, 0)
    benchmark = BenchmarkSettings(
        options.provider, steps=settings.steps, height=settings.height, width=settings.width, guidance=settings.guidance
    )
    rows: list[dict[str, Any]] = []
    service = 0.0  # seconds of a call: SingleStream's median, which comes first

    def run(backend: ReplicaBackend, count: int, scenario: str, rate: float = 1.0, load: float = 0.0) -> dict[str, Any]:
        number = max(8, min(SERVER_QUERIES, int(SERVER_SECONDS * rate))) if scenario == "Server" else queries * count
        of_all = loadgen.LoadGenSettings(scenario, len(prompts), 1, number, rate, callers=4 * count)
        if scenario == "SingleStream":
            of_all = loadgen.LoadGenSettings(scenario, len(prompts), 1, max(8, queries // 4))
        with tempfile.TemporaryDirectory() as logs:
            result = loadgen.run(backend, of_all, Path(logs))
        row = {"replicas": count, "scenario": scenario, **result}
        if scenario == "Server":
            row |= {"rate_per_s": rate, "load": load, "p99_times_call": result["latency_s"]["p99"] / service}
        rows.append(row)
        print(json.dumps(row), flush=True)
        return result

    for count in (1, len(loaded)):
        cluster = contextlib.nullcontext(SimpleNamespace(replicas=loaded[:count]))
        with ReplicaBackend(cluster, prompts, benchmark, [1]) as backend:
            backend.warm_up()
            if count == 1:
                single = run(backend, count, "SingleStream")
                service = single["latency_s"]["p50"]
            offline = run(backend, count, "Offline")["images_per_s"]
            if count > 1:
                sustained = throughput_model.poisson_load(service, count, LATENCY_GOAL * service, SUSTAINED_PERCENTILE)
                for load in (SERVER_LOAD, sustained):
                    run(backend, count, "Server", load * offline, load)
    return rows


def make(preset: str, folder: Path, provider: str) -> None:
    """Write `folder`: a preset with random weights, through a checkpoint in float16, optimized for the provider.

    "demo" is the demo model.
    """
    if preset == "demo":
        from sd_ort.stages import optimize

        optimize("demo", folder, target="cpu" if provider == "cpu" else "gpu")
        return
    import torch

    from scripts.bench.default_pipeline import save_checkpoint
    from sd_ort.runtime.provider_choice import target_of
    from sd_ort.stages import optimize

    start = time.perf_counter()
    with torch.no_grad(), tempfile.TemporaryDirectory(dir=folder.parent) as work:
        checkpoint = Path(work) / preset
        save_checkpoint(preset, checkpoint, provider)
        print(f"{preset}: a checkpoint after {time.perf_counter() - start:.0f} s", flush=True)
        dtype = "float32" if provider == "cpu" else "float16"
        optimize(checkpoint, folder, target=target_of(provider), dtype=dtype, calibrate=False)
    print(f"{preset}: {folder} after {time.perf_counter() - start:.0f} s", flush=True)


class Report:
    """The result: one stage after the other, written after each."""

    def __init__(self, options: argparse.Namespace, replicas: int) -> None:
        self.out = options.out
        shared = f"{replicas} replicas that share one device: a dry run"
        self.values: dict[str, Any] = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": " ".join(["scripts/bench/scale_gpus.py", *sys.argv[1:]]),
            "commit": machine.commit(),
            "machine": machine.machine(),
            "versions": machine.versions() | {name: metadata.version(name) for name in ("ray", "mlcommons_loadgen")},
            "processes": "plain, without Ray" if options.without_ray else "Ray's actors",
            "devices": f"{options.gpus} GPUs" if options.gpus else shared,
            "provider": options.provider,
            "model": str(options.folder),
            "settings": {"steps": options.steps, "side": options.side, "guidance": options.guidance},
            "failures": {},
        }
        self.started = time.perf_counter()

    def add(self, stage: str, measure: Callable[[], Any], key: str | None = None) -> Any:
        """Add what `measure` returns; None if it fails, which the report says."""
        try:
            result = self.values[key or stage] = measure()
        except Exception as error:  # the other stages go on
            traceback.print_exc()
            self.values["failures"][stage] = first_line(error)
            result = None
        print(f"{stage}: done after {time.perf_counter() - self.started:.0f} s", flush=True)
        if self.out:
            files.write_json(self.out, self.values)
        return result


def run_stages(options: argparse.Namespace, report: Report, openings: Sequence[here.ReplicaConfig]) -> None:
    """Run the stages that the options name."""
    settings = BatchSettings(options.side, options.side, options.steps, options.guidance)
    if {"scale", "kill", "loadgen"} & set(options.stages):
        with replicas_of(openings, ray=not options.without_ray) as replicas, asyncio.Runner() as runner:
            start = time.perf_counter()
            loaded = runner.run(load(replicas))
            report.values["load_s"] = time.perf_counter() - start
            if "scale" in options.stages:
                rows = report.add("scale", lambda: runner.run(measured(loaded, options, settings)), "rows")
                report.values["memory_MB"] = usage(loaded).memory
                report.values["device_memory_MB"] = device_memory(loaded)
                report.values["model_check"] = throughput_model.compare_throughput(rows or [])
            if "loadgen" in options.stages:
                report.add("loadgen", lambda: with_loadgen(loaded, options, settings))
            if "kill" in options.stages:
                report.add("kill", lambda: runner.run(killed(loaded, options, settings)))
    if "split" in options.stages:
        from scripts.bench import two_gpus

        arguments = {
            "prompt": options.prompt, "num_inference_steps": options.steps, "guidance_scale": options.guidance,
            "height": options.side, "width": options.side, "generator": 0, "progress": False,
        }  # fmt: skip
        report.add("split", lambda: two_gpus.measure(options.folder, options.provider, arguments, options.rounds))


def measure_presets(options: argparse.Namespace) -> int:
    """Make the folders of `--presets` at once, measure one after the other in its own process, and write the page."""
    script = [sys.executable, str(Path(__file__).resolve())]
    options.folder.mkdir(parents=True, exist_ok=True)
    provider = ["--provider", options.provider]
    folders = {preset: options.folder / preset for preset in options.presets}
    missing = [preset for preset, folder in folders.items() if not (folder / "model_index.json").is_file()]
    makers = [subprocess.Popen([*script, str(folders[preset]), "--make", preset, *provider]) for preset in missing]
    if sum(maker.wait() != 0 for maker in makers):
        raise SdOrtError(f"{options.folder}: a folder could not be made.")
    count = ["--gpus", str(options.gpus)] if options.gpus else ["--replicas", str(options.replicas or 1)]
    gpus = machine.gpus() if options.gpus else []
    device = f"{gpus[0].split()[1].lower()}x{options.gpus}" if gpus else "cpu"  # "NVIDIA H100 80GB HBM3, ..."
    code, results = 0, [options.out / f"ray_{preset}_{device}.json" for preset in options.presets]
    for preset, result in zip(options.presets, results, strict=True):
        result.unlink(missing_ok=True)
        settings = [*PRESETS[preset].split(), *provider, *count, "--stages", *options.stages, "--out", str(result)]
        code |= subprocess.run([*script, str(folders[preset]), *settings], check=False).returncode
    if written := sorted(options.out.glob("ray_*.json")):
        files.write_text(options.out / "ray.md", page(written))
    return code


def failures(values: Mapping[str, Any], gpus: int | None) -> list[str]:
    """Return what of a report misses a goal or went wrong; speeds count only with a GPU for each replica."""
    lines = [f"{stage}: {reason}" for stage, reason in values["failures"].items()]
    if kill := values.get("kill"):
        lines += [f"kill: {len(kill['lost'])} lost"] if kill["lost"] else []
        lines += [f"kill: {kill['differing']} differ"] if kill["differing"] else []
        lines += [] if kill["restarts"] else ["kill: no restart"]
    for row in values.get("loadgen", []) if gpus else []:
        if row.get("load", SERVER_LOAD) != SERVER_LOAD and row["p99_times_call"] > LATENCY_GOAL:
            lines.append(f"Server at {row['load']:.0%}: p99 {row['p99_times_call']:.2f} times a call")
    for row in values.get("rows", []) if gpus else []:
        goal = GOALS.get(row["replicas"])
        if goal and row["speedup"]["median"] < goal:
            lines.append(f"{row['replicas']} replicas: {row['speedup']['median']:.3f} times one, goal {goal}")
        if row["latency_p99_times_call"] > LATENCY_GOAL:
            lines.append(f"{row['replicas']} replicas: p99 {row['latency_p99_times_call']:.2f} times a call")
    return lines


def page(paths: Sequence[Path]) -> str:
    """Return a Markdown page of results."""
    reports = [files.read_json(path) for path in paths]
    lines = [
        "# Replicas through Ray on several devices", "",
        "Random weights, one image at a time on each replica. By `scripts/bench/scale_gpus.py`.", "",
    ]  # fmt: skip
    for path, report in zip(paths, reports, strict=True):
        gpus = report["machine"]["gpus"] or [report["machine"]["cpu"]]
        devices = "; ".join(f"{gpus.count(gpu)} x {gpu}" for gpu in dict.fromkeys(gpus))
        lines.append(f"- {path.stem}: {devices}; commit {report['commit']}, {report['date']}")
        lines += [f"    - not measured: {stage}: {reason}" for stage, reason in report["failures"].items()]
    lines += [
        "",
        "## Data parallel", "",
        "| | provider | replicas | images/s | times one | model | p50 | p99 | p99 / call "
        "| CPU ms an image: front, Ray, replica | kill: lost of, differing |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for path, report in zip(paths, reports, strict=True):
        model = {row["replicas"]: row["model_images_s"] for row in report.get("model_check", [])}
        for row in report.get("rows", []):
            cpu = ", ".join(f"{1e3 * seconds:.1f}" for seconds in row["cpu_s_an_image"].values())
            kill = report.get("kill")
            text = f"{len(kill['lost'])} of {kill['images']}, {kill['differing']} of {kill['compared']}" if kill else ""
            lines.append(
                f"| {path.stem}, {report['settings']['side']}², {report['settings']['steps']} steps "
                f"| {report['provider']} | {row['replicas']} | {row['images_s']['median']:.3f} "
                f"| {row['speedup']['median']:.3f} | {model.get(row['replicas'], row['images_s']['mean']):.3f} "
                f"| {row['latency_s']['p50']:.3f} s | {row['latency_s']['p99']:.3f} s "
                f"| {row['latency_p99_times_call']:.2f} | {cpu} | {text if row['replicas'] > 1 else ''} |"
            )
    lines += ["", "## MLPerf's LoadGen", "",
              "| | replicas | scenario | images/s | p50 | p99 | p99 / call | load | model p99 |",
              "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for path, report in zip(paths, reports, strict=True):
        for row in report.get("loadgen", []):
            latency = row["latency_s"]
            load = modeled = times = ""
            if row["scenario"] == "SingleStream":
                service = latency["p50"]
            if row["scenario"] != "Offline":
                times = f"{latency['p99'] / service:.2f}"
            if row["scenario"] == "Server":
                p99 = throughput_model.poisson_latency(service, row["replicas"], row["rate_per_s"], row["queries"])
                load, modeled = f"{row['load']:.0%} of {row['replicas']} replicas", f"{p99:.3f} s"
            images_s = row.get("images_per_s", 1 / latency["mean"])
            lines.append(
                f"| {path.stem} | {row['replicas']} | {row['scenario']} | {images_s:.3f} "
                f"| {latency['p50']:.3f} s | {latency['p99']:.3f} s | {times} | {load} | {modeled} |"
            )
    lines += ["", "## One image on two devices", "",
              "| | step | split | | model | image | split | | PSNR | decoding on the other: steps, images/s, model |",
              "|---|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for path, report in zip(paths, reports, strict=True):
        if split := report.get("split"):
            step, image = split["step_ms"], split["image_s"]
            model_step = throughput_model.compare_split(split, report["settings"]["steps"])["a step"][1]
            meanwhile = "; ".join(
                f"{row['steps']}: {row['images_s']['same device']:.2f} -> {row['images_s']['other device']:.2f}, "
                f"{row['model_images_s']:.2f}"
                for row in split["decoding"]
            )
            lines.append(
                f"| {path.stem} | {step['one']:.2f} ms | {step['two']:.2f} ms | {split['step_speedup']:.2f} "
                f"| {1e3 * model_step:.2f} ms | {image['one']:.3f} s | {image['two']:.3f} s "
                f"| {split['image_speedup']:.2f} | {split['psnr_db']:.1f} dB | {meanwhile} |"
            )
    return "\n".join(lines) + "\n"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="pipeline folder")
    parser.add_argument(
        "--check", type=Path, nargs="+", help="only print the model beside these results, or two_gpus.json"
    )
    parser.add_argument("--page", type=Path, nargs="+", help="only write a page of these results to --out")
    parser.add_argument("--make", help="only make the folder: a preset with random weights")
    parser.add_argument("--presets", nargs="+", choices=PRESETS, help="make and measure these below the folder")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES, help="what to measure (all)")
    parser.add_argument("--gpus", type=int, help="a replica on each of so many GPUs")
    parser.add_argument("--replicas", type=int, help="so many on the CPU: a dry run")
    parser.add_argument("--provider", default="cpu", help="execution provider (cpu)")
    parser.add_argument("--without-ray", action="store_true", help="plain processes instead of Ray's actors")
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="images generated at once (1)")
    parser.add_argument("--images", type=int, default=16, help="images of a replica in a round (16)")
    parser.add_argument("--compared", type=int, default=4, help="images whose bytes are compared after a kill (4)")
    parser.add_argument("--queries", type=int, default=64, help="of a LoadGen scenario (64)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (3)")
    parser.add_argument("--warm-up", type=int, default=3, help="batches of each size before the rounds (3)")
    parser.add_argument("--side", type=int, help="pixels (the model's)")
    parser.add_argument("--steps", type=int, default=25, help="denoising steps (25)")
    parser.add_argument("--guidance", type=float, default=7.5, help="guidance scale (7.5)")
    parser.add_argument("--prompt", default="a red circle on a blue background", help="what to draw")
    parser.add_argument("--out", type=Path, help="the result: JSON, or a page with --page")
    options = parser.parse_args()
    if options.folder is None and not options.check and not options.page:
        parser.error("give a pipeline folder")
    if options.page and not options.out:
        parser.error("--page needs --out")
    if options.presets and not options.out:
        parser.error("--presets needs --out: a folder")
    return options


def main() -> int:
    """Command line; returns the exit code: 1 where a goal is missed, an image is lost, or a stage fails."""
    options = parse_arguments()
    if options.check:
        for path in options.check:
            print(path)
            print_model(files.read_json(path))
        return 0
    if options.page:
        files.write_text(options.out, page(options.page))
        return 0
    if options.presets:
        return measure_presets(options)
    if options.make:
        make(options.make, options.folder, options.provider)
        return 0
    opening = here.ReplicaConfig(options.folder, {"provider": options.provider})
    openings = here.replica_configs(opening, options.gpus, options.replicas, None)
    report = Report(options, len(openings))
    run_stages(options, report, openings)
    print_model(report.values)
    lines = failures(report.values, options.gpus)
    print("\n".join(lines) or "all goals reached")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
