"""A server under load: requests to `sd-ort serve` with the demo model, a replica killed in the middle, nothing lost.

Sends the demo's unseen prompts from many clients at once, of two sizes and two numbers of steps, kills a replica's
process after a third of the answers, and counts what came back. Some answers are compared, byte for byte, with the
same picture drawn alone in this process. Writes a JSON file; exits with 1 when a request was lost or differs.
"""

from __future__ import annotations

import argparse
import base64
import datetime
import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from sd_ort import demo
from sd_ort.core import files, metrics
from sd_ort.demo.fidelity import unseen_prompts
from sd_ort.export.exporter import export
from sd_ort.runtime import machine
from sd_ort.serving.image_jobs import BatchSettings, ImageJob
from sd_ort.serving.replica import PipelineReplica, ReplicaConfig
from sd_ort.stages import optimize

SIDES, STEPS = (128, 64), (10, 5)


def fields_of(place: int, prompt: str) -> dict[str, Any]:
    """Request number `place`."""
    side, steps = SIDES[place % 2], STEPS[place // 2 % 2]
    return {"prompt": prompt, "seed": place, "size": f"{side}x{side}", "steps": steps, "guidance": demo.GUIDANCE}


def ask(address: str, fields: dict[str, Any]) -> tuple[int, bytes, float]:
    """Status, picture and seconds of a request; a full queue is asked again when it says so."""
    start = time.perf_counter()
    body, headers = json.dumps(fields).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/images/generations", body, headers)
    while True:
        try:
            with urllib.request.urlopen(request, timeout=3600) as response:
                (image,) = json.load(response)["data"]
                return response.status, base64.b64decode(image["b64_json"]), time.perf_counter() - start
        except urllib.error.HTTPError as error:
            if error.code != 503:
                return error.code, b"", time.perf_counter() - start
            time.sleep(float(error.headers["Retry-After"]))


def actors(process: int) -> list[psutil.Process]:
    """The replicas of a server."""
    return [each for each in psutil.Process(process).children(recursive=True) if "ray::Actor" in each.name()]


def numbers(address: str) -> dict[str, float]:
    """What /metrics says, without histograms."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=600) as response:
        lines = [line.split() for line in response.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines if "bucket" not in name and "created" not in name}


def load(address: str, server: int, options: argparse.Namespace) -> tuple[list[tuple[int, bytes, float]], float]:
    """All answers in the requests' order, and the seconds they took together; a replica is killed on the way."""
    prompts = unseen_prompts(options.requests, 0)
    start = time.perf_counter()
    with ThreadPoolExecutor(options.clients) as pool:
        asked = [pool.submit(ask, address, fields_of(place, prompt)) for place, prompt in enumerate(prompts)]
        for count, _ in enumerate(as_completed(asked), 1):
            if count == options.requests // 3:
                victim = actors(server)[0]
                victim.kill()
                print(f"{count} answers; replica {victim.pid} is killed", flush=True)
        return [each.result() for each in asked], time.perf_counter() - start


def differing(folder: Path, answers: list[tuple[int, bytes, float]], every: int) -> list[int]:
    """Places of those answers, of one in `every`, that are not the picture drawn alone."""
    alone = PipelineReplica(ReplicaConfig(folder, {"provider": "cpu"}))
    prompts = unseen_prompts(len(answers), 0)
    found = []
    for place in range(0, len(answers), every):
        fields = fields_of(place, prompts[place])
        side = int(fields["size"].split("x")[0])
        job = ImageJob(prompts[place], "", place, BatchSettings(side, side, fields["steps"], fields["guidance"]))
        if alone.generate([job]) != [answers[place][1]]:
            found.append(place)
    return found


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200, help="requests of one image (200)")
    parser.add_argument("--clients", type=int, default=24, help="that wait at once (24)")
    parser.add_argument("--replicas", type=int, default=2, help="on the CPU (2)")
    parser.add_argument("--compared", type=int, default=20, help="one in so many answers is drawn again alone (20)")
    parser.add_argument("--work", type=Path, default=Path("out/serve_load"), help="folder for the model")
    parser.add_argument("--out", type=Path, default=Path("results/serving/load_demo_cpu.json"), help="the result")
    options = parser.parse_args()

    export("demo", options.work / "raw", on_progress=print)
    optimize(options.work / "raw", options.work / "fused", target="cpu", on_progress=print)
    command = [sys.executable, "-m", "sd_ort", "serve", str(options.work / "fused"),
               "--replicas", str(options.replicas),
               "--port", "0"]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = next(line for line in server.stdout if "http://" in line).split()[-1]
        answers, seconds = load(address, server.pid, options)
        shown = numbers(address)
        processes = psutil.Process(server.pid).children(recursive=True)
        start = time.perf_counter()
        server.send_signal(signal.SIGTERM)
        server.wait()
        ended = time.perf_counter() - start
        left = psutil.wait_procs(processes, timeout=60)[1]
    statuses = Counter(status for status, _, _ in answers)
    wrong = differing(options.work / "fused", answers, options.compared)
    report = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["scripts/checks/serve_load.py", *sys.argv[1:]]),
        "commit": machine.commit(),
        "machine": machine.machine(),
        "versions": machine.versions() | {name: metadata.version(name) for name in ("ray", "starlette", "uvicorn")},
        "settings": {"model": "demo", "requests": options.requests, "clients": options.clients,
                     "replicas": options.replicas, "sides": SIDES, "steps": STEPS},
        "statuses": dict(statuses),
        "compared": len(range(0, options.requests, options.compared)),
        "differing": wrong,
        "seconds": seconds,
        "images_s": options.requests / seconds,
        "request_s": metrics.summary([each for _, _, each in answers]),
        "metrics": shown,
        "seconds_to_end": ended,
        "exit_code": server.returncode,
        "processes_left": len(left),
    }  # fmt: skip
    files.write_json(options.out, report)
    lost = options.requests - statuses[200]
    batch = shown["sd_ort_images_total"] / shown["sd_ort_batches_total"]
    print(f"{statuses[200]} of {options.requests} answered in {seconds:.0f} s, {batch:.1f} images a batch, "
          f"{shown['sd_ort_replica_restarts_total']:.0f} restart, {len(wrong)} differ, "
          f"{len(left)} processes left after {ended:.1f} s: {options.out}")  # fmt: skip
    return 1 if lost or wrong or left else 0


if __name__ == "__main__":
    sys.exit(main())
