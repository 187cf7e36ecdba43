"""Wall time from the shell's return key to the PNG: `sd-ort generate` and its parts, beside diffusers' cold start.

    python scripts/bench/cold_start.py MODEL FOLDER [--provider cpu] [--steps 5] [--runs 5] [--machine NAME]

MODEL is a diffusers folder, FOLDER the output of `sd-ort optimize`. Every run is a process of its own. The fastest of
several runs counts, because other processes may use the machine; CPU seconds are user and system time. `without
bytecode` runs with an empty cache of compiled Python files, as in a read-only container. The first run has an empty
cache of sd-ort, on a machine whose page cache has the packages. `exit` is the time from the last line of a script to
the end of its process. --profile prints what Python calls take in the first image. Writes
results/cold_start_<machine>.json and .md.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from scripts.report import save
from scripts.report import table as markdown
from sd_ort.core.cache import cache_folder
from sd_ort.runtime import machine

RESULTS = Path(__file__).resolve().parents[2] / "results"
PROMPT = "a red circle on a blue background"
PARTS = ("interpreter", "imports", "sessions and weights", "first call", "PNG", "exit")
# Each prints the seconds since the epoch after a part.
OURS = """
import time; marks = [time.time()]
import sys; model, provider, steps, out = sys.argv[1:]
from sd_ort.cli import generate
from sd_ort.pipelines.png import png_bytes
from sd_ort import StableDiffusionPipeline; import onnxruntime
marks.append(time.time())
pipeline = StableDiffusionPipeline.from_pretrained(model, provider)
marks.append(time.time())
image = pipeline({prompt!r}, num_inference_steps=int(steps), generator=1, progress=False).images[0]
marks.append(time.time())
open(out, "wb").write(png_bytes(image, {{}}))
marks.append(time.time())
print(*marks, flush=True)
import os; os._exit(0)  # as `sd-ort generate` ends
"""
PROFILED = OURS.replace("image = pipeline(", "import cProfile, pstats\nprofile = cProfile.Profile()\n"
                        "image = profile.runcall(pipeline, ").replace(
                        "print(*marks, flush=True)", "pstats.Stats(profile).sort_stats('cumtime').print_stats(80)\n"
                        "sys.stdout.flush()")  # fmt: skip
DIFFUSERS = """
import time; marks = [time.time()]
import sys; model, provider, steps, out = sys.argv[1:]
import torch
from diffusers import DiffusionPipeline
marks.append(time.time())
device = "cpu" if provider == "cpu" else "cuda"
dtype = torch.float32 if device == "cpu" else torch.float16
pipeline = DiffusionPipeline.from_pretrained(model, torch_dtype=dtype, safety_checker=None).to(device)
pipeline.set_progress_bar_config(disable=True)
marks.append(time.time())
image = pipeline({prompt!r}, num_inference_steps=int(steps), generator=torch.Generator().manual_seed(1)).images[0]
marks.append(time.time())
image.save(out)
marks.append(time.time())
print(*marks)
"""


def run(command: list[str], environment: Mapping[str, str]) -> tuple[float, float, float, str]:
    """Return when a process started, its wall and CPU seconds, and its output."""
    before, started, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.time(), time.perf_counter()
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(done.stderr)
    return started, wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def fastest(command: list[str], runs: int, environment: Mapping[str, str] | None = None) -> dict[str, float]:
    """Return the least wall and CPU seconds of several runs after a first one."""
    every = [run(command, environment or {})[1:3] for _ in range(runs + 1)][1:]
    return {"seconds": round(min(wall for wall, _ in every), 2), "cpu_seconds": round(min(cpu for _, cpu in every), 2)}


def parts(code: str, arguments: list[str], runs: int) -> dict[str, float]:
    """Return the least seconds of each part of a cold start."""
    every = []
    for _ in range(runs + 1):
        started, wall, _, output = run([sys.executable, "-c", code.format(prompt=PROMPT), *arguments], {})
        marks = [started, *map(float, output.split()), started + wall]
        every.append([end - begin for begin, end in pairwise(marks)])
    return {part: round(min(times), 3) for part, times in zip(PARTS, zip(*every[1:], strict=True), strict=True)}


def table(result: Mapping[str, Any]) -> str:
    host, ours, theirs = result["machine"], result["parts"]["sd-ort"], result["parts"]["diffusers"]
    lines = [
        "# Cold start",
        "",
        f"`sd-ort generate` takes {result['commands']['sd-ort generate']['seconds']} s from the return key to the PNG, "
        f"its parts {sum(ours.values()):.2f} s; those of a diffusers script {sum(theirs.values()):.2f} s.",
        "",
        f"{result['model']}, {result['steps']} steps, provider {result['provider']}, on {host['cpu']} with "
        f"{host['cores']} cores, commit {host['commit']}: the fastest of {result['runs']} runs, in seconds. "
        "Made by `python scripts/bench/cold_start.py`.",
        "",
        *markdown(("command", "wall", "CPU"), ((name, *row.values()) for name, row in result["commands"].items())),
        "",
        *markdown(("part", "sd-ort", "diffusers"), [*((part, ours[part], theirs[part]) for part in PARTS),
                  ("sum", f"{sum(ours.values()):.2f}", f"{sum(theirs.values()):.2f}")]),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="diffusers folder")
    parser.add_argument("folder", help="what `sd-ort optimize` made of it")
    parser.add_argument("--provider", default="cpu")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--machine", default="cpu")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        cli = [sys.executable, "-m", "sd_ort"]
        generate = [*cli, "generate", PROMPT, "--model", options.folder, "--provider", options.provider, "--seed", "1",
                    "--steps", str(options.steps), "--out", f"{work}/a.png", "--overwrite"]  # fmt: skip
        no_bytecode = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": f"{work}/empty"}
        arguments = [options.provider, str(options.steps), f"{work}/b.png"]
        if options.profile:
            print(run([sys.executable, "-c", PROFILED.format(prompt=PROMPT), options.folder, *arguments], {})[3])
        empty = Path(work) / "cache" / "sd-ort"  # but for the libraries, which users build or install before
        empty.mkdir(parents=True)
        if (libraries := cache_folder() / "ops").is_dir():
            (empty / "ops").symlink_to(libraries)
        run(generate, {})  # the first process on a machine reads packages and drivers from its disk
        first = run(generate, {"XDG_CACHE_HOME": f"{work}/cache"})
        result = {
            "machine": {**machine.machine(), "commit": machine.commit(), "versions": machine.versions()},
            "model": Path(options.model).name,
            "provider": options.provider,
            "steps": options.steps,
            "runs": options.runs,
            "commands": {
                "sd-ort --help": fastest([*cli, "--help"], options.runs),
                "sd-ort generate": fastest(generate, options.runs),
                "sd-ort generate, without bytecode": fastest(generate, options.runs, no_bytecode),
                "sd-ort generate, first run, empty cache": {
                    "seconds": round(first[1], 2), "cpu_seconds": round(first[2], 2)
                },
            },
            "parts": {
                "sd-ort": parts(OURS, [options.folder, *arguments], options.runs),
                "diffusers": parts(DIFFUSERS, [options.model, *arguments], options.runs),
            },
        }  # fmt: skip
    path = RESULTS / f"cold_start_{options.machine}.json"
    save(path, result, table(result))
    print(table(result))


if __name__ == "__main__":
    main()
