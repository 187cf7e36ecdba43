"""A server under load: requests to `sd-ort serve` with the demo model, a replica killed in the middle, nothing lost.

Sends the demo's unseen prompts from many clients at once, of two sizes and two numbers of steps, kills a replica's
process after a third of the answers, and counts what came back. Some answers are compared, byte for byte, with the
same image generated alone in this process. --hostile sends hostile requests among them, each of which must be refused.
Memory is measured 20 times: the last quarter may exceed the second by 5 % at most. Writes a JSON file; exits with 1
if a request was lost or differs, a hostile one was not refused, or memory grew.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import datetime
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from scripts.report import head
from sd_ort import demo
from sd_ort.core import files, metrics
from sd_ort.demo.fidelity import unseen_prompts
from sd_ort.serving.image_jobs import BatchSettings, ImageJob
from sd_ort.serving.replica import PipelineReplica, ReplicaConfig
from sd_ort.stages import optimize


def fields_of(number: int, prompt: str, options: argparse.Namespace) -> dict[str, Any]:
    """Request number `number`."""
    side, steps = options.sides[number % 2], options.steps[number // 2 % 2]
    return {"prompt": prompt, "seed": number, "size": f"{side}x{side}", "steps": steps, "guidance": demo.GUIDANCE}


def ask(address: str, fields: dict[str, Any]) -> tuple[int, bytes, float]:
    """Status, image and seconds of a request; a full queue is asked again when it says so."""
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


JSON = "application/json"
# Content type, body and headers of hostile requests, each with the statuses of a refusal.
HOSTILE: list[tuple[str, bytes, dict[str, str], set[int]]] = [
    (JSON, b"{", {}, {400}),
    (JSON, b"[" * 50_000, {}, {400}),
    (JSON, b"\xff\xfe", {}, {400}),
    (JSON, b'{"prompt": "a", "size": "64x32768"}', {}, {400}),
    (JSON, b'{"prompt": "a", "n": 1000000000}', {}, {400}),
    (JSON, b'{"prompt": "a", "steps": 1e400}', {}, {400}),
    (JSON, b'{"prompt": ["a"], "seed": -1, "guidance": NaN}', {}, {400}),
    (JSON, json.dumps({"prompt": "x" * 2_000_000}).encode(), {}, {400, 413}),
    ("text/plain", b'{"prompt": "a"}', {}, {415}),
    (JSON, b'{"prompt": "a"}', {"Host": "evil.example"}, {403}),
    (JSON, b'{"prompt": "a"}', {"Origin": "http://evil.example"}, {403}),
    (JSON, b'{"prompt": "\\ud800"}', {}, {400}),
]


def attack(address: str, number: int) -> bool:
    """Send hostile request number `number`; return whether it was refused in one line."""
    host, port = address.removeprefix("http://").split(":")
    if number % (len(HOSTILE) + 2) >= len(HOSTILE):  # unfinished headers, or an unfinished body: left alone
        with socket.create_connection((host, int(port)), 600) as client:
            length = b"Content-Length: 9\r\n\r\n{" if number % 2 else b""
            client.sendall(b"POST /v1/images/generations HTTP/1.1\r\nHost: localhost\r\n" + length)
            answer = client.recv(100)
        return answer == b"" or b" 4" in answer[:12]
    kind, body, headers, statuses = HOSTILE[number % (len(HOSTILE) + 2)]
    request = urllib.request.Request(f"{address}/v1/images/generations", body, {"Content-Type": kind, **headers})
    try:
        urllib.request.urlopen(request, timeout=600).close()
    except urllib.error.HTTPError as error:
        return error.code in statuses and len(json.load(error)["error"]["message"].splitlines()) == 1
    except (ConnectionError, urllib.error.URLError):  # closed before the whole body was sent
        return 413 in statuses
    return False


def memory_MB(server: int) -> float:
    """Private memory of a server and its processes, in MB."""
    total = 0
    for process in (psutil.Process(server), *psutil.Process(server).children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            total += process.memory_full_info().uss
    return total / 1e6


def actors(process: int) -> list[psutil.Process]:
    """The replicas of a server."""
    return [each for each in psutil.Process(process).children(recursive=True) if "ray::Actor" in each.name()]


def numbers(address: str) -> dict[str, float]:
    """Return the counters and gauges of /metrics."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=600) as response:
        lines = [line.split() for line in response.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines if "bucket" not in name and "created" not in name}


@dataclass
class Load:
    """Answers in the order of the requests, seconds for all, outcomes of hostile requests, and memory in MB."""

    answers: list[tuple[int, bytes, float]]
    seconds: float
    refused: list[bool]
    memory: list[float]

    @property
    def is_flat(self) -> bool:
        """Whether memory of the last quarter is at most 5 % above that of the second."""
        quarter = len(self.memory) // 4
        return max(self.memory[-quarter:]) <= 1.05 * max(self.memory[quarter : 2 * quarter])


def load(address: str, server: int, options: argparse.Namespace) -> Load:
    """Send all requests, hostile ones evenly among them, and kill a replica after a third of the answers."""
    prompts = unseen_prompts(options.requests, 0)
    every = round(1 / options.hostile) if options.hostile else options.requests + 1
    start, memory = time.perf_counter(), []
    with ThreadPoolExecutor(options.clients) as pool, ThreadPoolExecutor(4) as attackers:
        futures = [
            pool.submit(ask, address, fields_of(number, prompt, options)) for number, prompt in enumerate(prompts)
        ]
        attacks = []
        for count, _ in enumerate(as_completed(futures), 1):
            if count % every == 0:
                attacks.append(attackers.submit(attack, address, count // every))
            if count % (options.requests // 20) == 0:
                memory.append(memory_MB(server))
            if count == options.requests // 3:
                victim = actors(server)[0]
                victim.kill()
                print(f"{count} answers; replica {victim.pid} is killed", flush=True)
        answers, seconds = [each.result() for each in futures], time.perf_counter() - start
        return Load(answers, seconds, [each.result() for each in attacks], memory)


def differing(folder: Path, answers: list[tuple[int, bytes, float]], options: argparse.Namespace) -> list[int]:
    """Return the indices of the answers, of one in `options.compared`, that are not the image generated alone."""
    alone = PipelineReplica(ReplicaConfig(folder, {"provider": "cpu"}))
    prompts = unseen_prompts(len(answers), 0)
    indices = []
    for number in range(0, len(answers), options.compared):
        fields = fields_of(number, prompts[number], options)
        side = int(fields["size"].split("x")[0])
        job = ImageJob(prompts[number], "", number, BatchSettings(side, side, fields["steps"], fields["guidance"]))
        if alone.generate([job]) != [answers[number][1]]:
            indices.append(number)
    return indices


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200, help="requests of one image (200)")
    parser.add_argument("--clients", type=int, default=24, help="that wait at once (24)")
    parser.add_argument("--replicas", type=int, default=2, help="on the CPU (2)")
    parser.add_argument("--sides", type=int, nargs=2, default=(128, 64), help="pixels, by turns (128 64)")
    parser.add_argument("--steps", type=int, nargs=2, default=(10, 5), help="by turns (10 5)")
    parser.add_argument("--hostile", type=float, default=0.0, help="share of hostile requests beside these (0)")
    parser.add_argument("--compared", type=int, default=20, help="one in so many answers is generated again alone (20)")
    parser.add_argument("--work", type=Path, default=Path("out/serve_load"), help="folder for the model")
    parser.add_argument("--out", type=Path, default=Path("results/serving/load_demo_cpu.json"), help="the result")
    options = parser.parse_args()

    optimize("demo", options.work / "fused", target="cpu", on_progress=print)
    command = [sys.executable, "-m", "sd_ort", "serve", str(options.work / "fused"),
               "--replicas", str(options.replicas),
               "--port", "0"]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = next(line for line in server.stdout if "http://" in line).split()[-1]
        loaded = load(address, server.pid, options)
        shown = numbers(address)
        processes = psutil.Process(server.pid).children(recursive=True)
        start = time.perf_counter()
        server.send_signal(signal.SIGTERM)
        server.wait()
        ended = time.perf_counter() - start
        alive = psutil.wait_procs(processes, timeout=60)[1]
    answers, seconds = loaded.answers, loaded.seconds
    statuses = Counter(status for status, _, _ in answers)
    wrong = differing(options.work / "fused", answers, options)
    beginning = head("scripts/checks/serve_load.py")
    report = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **beginning,
        "versions": beginning["versions"] | {name: metadata.version(name) for name in ("ray", "starlette", "uvicorn")},
        "settings": {"model": "demo", "requests": options.requests, "clients": options.clients,
                     "replicas": options.replicas, "sides": options.sides, "steps": options.steps},
        "statuses": dict(statuses),
        "hostile": len(loaded.refused),
        "hostile_refused": sum(loaded.refused),
        "memory_MB": loaded.memory,
        "memory_is_flat": loaded.is_flat,
        "compared": len(range(0, options.requests, options.compared)),
        "differing": wrong,
        "seconds": seconds,
        "images_s": options.requests / seconds,
        "request_s": metrics.summary([each for _, _, each in answers]),
        "metrics": shown,
        "seconds_to_end": ended,
        "exit_code": server.returncode,
        "processes_left": len(alive),
    }  # fmt: skip
    files.write_json(options.out, report)
    lost = options.requests - statuses[200]
    batch = shown["sd_ort_images_total"] / shown["sd_ort_batches_total"]
    print(f"{statuses[200]} of {options.requests} answered in {seconds:.0f} s, {batch:.1f} images a batch, "
          f"{shown['sd_ort_replica_restarts_total']:.0f} restart, {len(wrong)} differ, "
          f"{sum(loaded.refused)} of {len(loaded.refused)} hostile ones refused, memory {loaded.memory[0]:.0f} to "
          f"{loaded.memory[-1]:.0f} MB, {len(alive)} processes left after {ended:.1f} s: {options.out}")  # fmt: skip
    return 1 if lost or wrong or alive or not all(loaded.refused) or not loaded.is_flat else 0


if __name__ == "__main__":
    sys.exit(main())
