"""SD 1.5's U-Net on the CPU in int8 beside float32, bfloat16, and OpenVINO's models. Writes results/cpu_int8.*.

    sd-ort export --preset sd15 --random-weights --component unet RAW
    python -m venv VENV && VENV/bin/pip install openvino nncf
    python scripts/bench/cpu_int8.py RAW --openvino VENV/bin/python

Engines run in turn, a process each with one thread and with --threads: a call that is not timed, then --calls. A time
is the shortest of all turns. The processor time of one thread, which waits for nobody, is that which other work on the
machine disturbs least. The error is that of the noise prediction (relative, L2) beside float32. Activations are
calibrated on three synthetic runs of this size. Models of the work folder are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from scripts.report import head, save, table
from sd_ort.checkpoints.configs import component_config
from sd_ort.checkpoints.synthetic_inputs import random_inputs
from sd_ort.core import metrics, pipeline_folder
from sd_ort.core.pipeline_folder import MODEL
from sd_ort.graphs.load import load
from sd_ort.runtime import session
from sd_ort.runtime.machine import multiplies_bfloat16
from sd_ort.stages import optimize

OURS: Mapping[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"eight_bits": "int8"},
    "int8, bfloat16": {"eight_bits": "int8", "dtype": "bfloat16"},
}
RUNS = 3


def write_runs(raw: Path, path: Path, size: int) -> None:
    """Write synthetic runs of the U-Net with `size` x `size` latents, batch 2."""
    inputs = list(load(raw / "unet" / MODEL).graph.inputs)
    sizes = {"batch": 2, "height": size, "width": size, "sequence": 77}
    arrays = {
        f"unet/{name}/{run}": values
        for run in range(RUNS)
        for name, values in random_inputs("unet", inputs, component_config(raw, "unet"), sizes, run).items()
    }
    np.savez(path, **arrays)  # type: ignore[arg-type]


def run_ours(folder: Path, runs: Path, out: Path, threads: int, calls: int) -> dict[str, Any]:
    """Return the times of calls of a folder's U-Net; write its output to `out`."""
    arrays = np.load(runs)
    feed = {name.split("/")[1]: arrays[name] for name in arrays.files if name.endswith("/0")}
    model = session.load(folder, "unet", "cpu", session.SessionOptions(threads=threads))
    np.save(out, next(iter(model(**feed).values())))
    result: dict[str, Any] = {"wall": [], "processor": []}
    for _ in range(calls):
        start = time.perf_counter(), time.process_time()
        model(**feed)
        result["wall"].append(time.perf_counter() - start[0])
        result["processor"].append(time.process_time() - start[1])
    return result


def page(report: dict[str, Any]) -> str:
    machine = report["machine"]
    lines = [
        "# SD 1.5's U-Net on the CPU in int8",
        "",
        f"Written by `{report['command']}` at {report['commit']} on {machine['cpu']}, {report['threads']} threads, "
        f"{report['size']} x {report['size']} latents, batch 2, random weights; shortest of {report['turns']} turns "
        f"of {report['calls']} calls. Matrix units: {report['units']}. The machine has {os.cpu_count()} cores; its "
        f"load average was {report['load'][0]:.1f} before the first turn and {report['load'][1]:.1f} after the last: "
        "above 1, other work disturbed the seconds of several threads, the processor time of one thread least.",
        "",
    ]
    peer = report["times"].get("OpenVINO int8")
    rows = []
    for name, times in report["times"].items():
        processor = min(times["processor 1"])
        of_peer = f"{processor / min(peer['processor 1']):.2f}" if peer else ""
        wall = min(times[f"wall {report['threads']}"])
        rows.append((name, f"{processor:.3f}", of_peer, f"{wall:.3f}", f"{report['errors'][name]:.1e}"))
    names = ("U-Net", "one thread: processor s", "of OpenVINO int8", f"{report['threads']} threads: s", "error")
    return "\n".join([*lines, *table(names, rows)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("raw", type=Path, help="the exported pipeline folder, or one engine's with --child")
    parser.add_argument("--openvino", type=Path, help="a Python with openvino and nncf")
    parser.add_argument("--engines", nargs="*", help="ours: float32, bfloat16, int8; OpenVINO float32, ... (all)")
    parser.add_argument("--size", type=int, default=32, help="of the latents (32)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("out/cpu_int8"))
    parser.add_argument("--out", type=Path, default=Path("results/cpu_int8.json"))
    parser.add_argument("--child", type=Path, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        runs, out = options.child
        print(json.dumps(run_ours(options.raw, runs, out, options.threads, options.calls)))
        return
    work = options.work
    work.mkdir(parents=True, exist_ok=True)
    runs = work / f"runs-{options.size}.npz"
    if not runs.is_file():
        write_runs(options.raw, runs, options.size)
    common = ["--threads", "{threads}", "--calls", str(options.calls)]
    commands: dict[str, list[str]] = {}
    for name, settings in OURS.items():
        folder = work / name
        inputs = {"inputs": runs} if "eight_bits" in settings else {}
        if options.engines is None or name in options.engines:
            if not (folder / pipeline_folder.MANIFEST).is_file():
                optimize(
                    options.raw, folder, target="cpu", components=["unet"], on_progress=print, **settings, **inputs
                )
            commands[name] = [sys.executable, __file__, str(folder), "--child", str(runs), "{out}", *common]
    for precision in ("float32", "bfloat16", "int8", "int8, bfloat16") if options.openvino else ():
        name = f"OpenVINO {precision}"
        if options.engines is None or name in options.engines:
            script = Path(__file__).with_name("openvino_unet.py")
            source = [str(options.raw / "unet" / MODEL), str(runs), "{out}", precision]
            commands[name] = [
                str(options.openvino),
                str(script),
                *source,
                *common,
                "--quantized",
                str(work / "int8.xml"),
            ]
    report: dict[str, Any] = head("scripts/bench/cpu_int8.py") | {
        "size": options.size, "threads": options.threads, "calls": options.calls, "turns": options.turns,
        "units": "AMX" if multiplies_bfloat16() else "none (no AMX)", "times": {}, "errors": {},
        "load": [os.getloadavg()[0]],
    }  # fmt: skip
    for _, (name, command), threads in product(range(options.turns), commands.items(), {1, options.threads}):
        places = {"{out}": str(work / f"{name}.npy"), "{threads}": str(threads)}
        done = subprocess.run([places.get(part, part) for part in command], capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{name} fails: {done.stderr[-2000:]}")
        times = json.loads(done.stdout.splitlines()[-1])
        for key, values in times.items():
            report["times"].setdefault(name, {}).setdefault(f"{key} {threads}", []).extend(values)
        shortest = {key: round(min(values), 3) for key, values in times.items()}
        print(name, threads, shortest, flush=True)
    report["load"].append(os.getloadavg()[0])
    expected = np.load(work / f"{next(iter(commands))}.npy")
    report["errors"] = {n: metrics.relative_l2_error(np.load(work / f"{n}.npy"), expected) for n in commands}
    save(options.out, report, page(report))


if __name__ == "__main__":
    main()
