#!/usr/bin/env python3
"""Launches, compilations and searches of a call of a new size on an AMD GPU: results/amd/sizes.md and .json.

    sd-ort build-ops --hip gfx1100 gfx942
    python scripts/amd/new_sizes.py --arch gfx1100 gfx942

Stable Diffusion 1.5 with random weights in float16, its U-Net for an image with guidance and its VAE decoder, at full
size under scripts/amd/simulate. Kernels are skipped: calls and launches are those of a GPU, values and times are not.
Each row is one call of the sequence `SIZES`, all in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping
from ctypes import CDLL
from pathlib import Path
from typing import Any

import numpy as np

from scripts.amd.simulated_runs import ROOT, Simulation, Table
from sd_ort.core.pipeline_folder import MODEL
from sd_ort.runtime.bound_run import GpuGraphModel
from sd_ort.runtime.providers import provider_named
from sd_ort.runtime.session import OrtModel, SessionOptions, create_session

SIZES = ((512, 512), (768, 512), (512, 512), (768, 512), (1024, 1024))  # height, width in pixels
MEASURED = ("unet", "vae_decoder")
# Calls of HIP and hipBLASLt -> heading. Only the tuner times kernels by hipEventElapsedTime.
CALLS = {
    "__hipRegisterFatBinary": "code objects loaded",
    "hipEventElapsedTime": "kernels timed",
    "hipblasLtMatmulAlgoGetHeuristic": "hipBLASLt proposals asked",
    "hipMalloc": "device allocations",
    "hipGraphInstantiateWithFlags": "graphs captured",
    "hipGraphLaunch": "graph launches",
}
COLUMNS = {
    "target": "simulated GPU",
    "component": "call",
    "size": "image",
    "case": "in the process",
    "launches": "kernels launched",
    **CALLS,
    "processes": "processes started",
    "files": "files written",
    "commit": "commit",
}
COMPILERS = re.compile(r"\S*(?:hiprtc|comgr|MIOpen|migraphx)\S*")
TITLE = "A call of a new size on a simulated AMD GPU"
NOTE = """No AMD GPU was used. Stable Diffusion 1.5 (random weights, float16, `--provider hip`, nothing tuned), the
U-Net for an image with guidance and the VAE decoder, at full size under `scripts/amd/simulate` with kernels skipped. By
`scripts/amd/new_sizes.py`; one process a GPU, its calls in this order.

A new size compiles nothing and searches nothing: code objects are loaded by the process's first launch, no kernel is
timed, no process is started, Python writes no file, and no compiler library (hiprtc, comgr), MIOpen or MIGraphX is in
the process. A new size runs the U-Net four times, to learn the outputs' shapes, to choose kernels, to capture and to
replay; later calls replay the captured graph. hipBLASLt is asked once for its proposals of each new shape, which it
answers without running anything. The first call also transforms filters, which the session keeps. gfx942 launches more
kernels: it has more multiprocessors, so more convolutions are split, and another kernel sums their parts."""


def run_calls(folder: Path) -> None:
    """Run all calls and print a line of JSON for each. Runs under scripts/amd/simulate with a report."""
    started: list[str] = []
    written: list[str] = []

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event in PROCESS_EVENTS:
            started.append(event)
        elif event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            written.append(str(arguments[0]))

    sys.addaudithook(audit)
    options = {name: SessionOptions(library=False, capture=name == "unet") for name in MEASURED}
    sessions = {name: create_session(folder / name / MODEL, "hip", options[name]) for name in MEASURED}
    models = {
        "unet": GpuGraphModel(sessions["unet"], provider_named("hip").device),
        "vae_decoder": OrtModel(sessions["vae_decoder"]),
    }
    seen: dict[str, set[tuple[int, int]]] = {name: set() for name in MEASURED}
    for size in SIZES:
        for name, model in models.items():
            before = _report()
            started.clear()
            written.clear()
            model(**_inputs(model, *size))
            after = _report()
            case = "again" if size in seen[name] else "a new size" if seen[name] else "the first call"
            seen[name].add(size)
            row = {
                "component": name,
                "size": f"{size[1]}x{size[0]}",
                "case": case,
                "launches": _launches(after) - _launches(before),
                **{call: after["calls"].get(call, 0) - before["calls"].get(call, 0) for call in CALLS},
                "processes": len(started),
                "files": len(written),
                "compilers": COMPILERS.findall(Path("/proc/self/maps").read_text()),
            }
            print(json.dumps(row), flush=True)


PROCESS_EVENTS = {"subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "os.fork"}


def _inputs(model: OrtModel, height: int, width: int) -> dict[str, np.ndarray]:
    """Zeros for a size: two rows, as with guidance, for a U-Net."""
    sizes = {
        "height": height // 8,
        "width": width // 8,
        "batch": 2 if "timestep" in model.inputs else 1,
        "sequence": 77,
    }
    shapes = {name: [sizes.get(axis, axis) for axis in value.shape] for name, value in model.inputs.items()}
    return {name: np.zeros(shape, model.dtype(name)) for name, shape in shapes.items()}


def _report() -> Any:
    """Return the report of the simulated HIP runtime on this process."""
    CDLL("libamdhip64.so.7").simulated_hip_write_report()
    return json.loads(Path(os.environ["SIMULATED_HIP_REPORT"].replace("%p", str(os.getpid()))).read_text())


def _launches(report: Mapping[str, Any]) -> int:
    return sum(use["launches"] for use in report["kernels"].values())


def export(folder: Path) -> None:
    """Make the folder of Stable Diffusion 1.5 with random weights, unless it is there."""
    from sd_ort.export.exporter import export as export_preset
    from sd_ort.stages import optimize

    if folder.is_dir():
        return
    raw = folder.with_name(f"{folder.name}-raw")
    if not raw.is_dir():
        export_preset(None, raw, preset="sd15", random_weights=True, components=list(MEASURED))
    optimize(raw, folder, target="hip", dtype="float16", components=list(MEASURED), hoist=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=["gfx1100", "gfx942"])
    parser.add_argument("--model", type=Path, default=ROOT / "out/new_sizes/sd15", help="made if it is not there")
    parser.add_argument("--out", type=Path, default=ROOT / "results/amd")
    parser.add_argument("--timeout", type=float, default=600, help="seconds of each GPU [%(default)s]")
    parser.add_argument("--calls", action="store_true", help=argparse.SUPPRESS)  # under scripts/amd/simulate
    options = parser.parse_args()
    if options.calls:
        run_calls(options.model)
        return
    export(options.model)
    table = Table(options.out / "sizes", TITLE, COLUMNS, NOTE, keys=("target", "component", "size", "case"))
    for target in options.arch:
        measure(target, options.model, table, options.timeout)


def measure(target: str, model: Path, table: Table, timeout: float) -> None:
    """Run the calls on a target and add their rows. Raises SystemExit for a fault, a compilation or a search."""
    folder = model.with_name(f"{model.name}-{target}")
    environment = {"SD_ORT_TUNING": str(folder / "tuning")}
    simulation = Simulation(target, folder, ("--kernels", "skip", "--memory", "16G"), environment)
    run = simulation.run("calls", [sys.executable, Path(__file__), "--calls", "--model", model], timeout)
    if run.faults:
        raise SystemExit("; ".join(run.faults))
    for row in map(json.loads, re.findall(r"^\{.*\}$", run.output, re.MULTILINE)):
        if problem := new_work(row):
            raise SystemExit(f"{target}, {row['component']}, {row['size']}: {problem}")
        table.add({"target": target, **row})


def new_work(row: Mapping[str, Any]) -> str | None:
    """Return what a call did that a new size must not do; None for nothing."""
    done = {name: row[name] for name in ("hipEventElapsedTime", "processes", "files", "compilers") if row[name]}
    if row["case"] in ("a new size", "again") and row["__hipRegisterFatBinary"]:
        done["__hipRegisterFatBinary"] = row["__hipRegisterFatBinary"]
    return ", ".join(f"{name}: {value}" for name, value in done.items()) or None


if __name__ == "__main__":
    main()
