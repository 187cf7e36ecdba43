"""Run commands on the simulated GPU and keep a table of the results.

table = Table(Path("results/amd/hip"), "--provider hip", COLUMNS)
run = Simulation("gfx1100", work).run("generate", ["sd-ort", "generate", ...])
table.add({"target": "gfx1100", "case": "generate", **run.row(), **compare_images(expected, image)})
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from sd_ort.core import files
from sd_ort.runtime import machine
from sd_ort.runtime.library import SOURCES, library_path

ROOT = Path(__file__).resolve().parents[2]
SIMULATE = ROOT / "scripts/amd/simulate"
DRAWING = ROOT / "scripts/amd/draw_hip.py"
# Image of draw_hip.py -> the CPU provider's image of the same size, seed and LoRA, if it has another name.
SAME_IMAGES = {"again-0": "square-0", "before-0": "square-0", "second-0": "square-0"}
# Program of draw_hip.py -> two of its images with the same seed, size and weights.
SAME_SEED = {"sizes": ("square-0", "again-0"), "lora": ("before-0", "after-0"), "threads": ("square-0", "second-0")}
# dtype -> largest mean difference from the CPU provider's image, in steps of 1/255, that rounding explains.
MEAN_LIMIT = {"float16": 0.5, "bfloat16": 2.0}
FAULT = re.compile(r"^simulated (?:HIP|hipBLASLt|hipBLAS|MIOpen).*", re.MULTILINE)


@dataclass(frozen=True)
class Run:
    """A command that ended, and the sum of the reports of its processes."""

    command: list[str]
    seconds: float
    status: int | None  # None: it ran past its time
    output: str
    kernels: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    calls: Mapping[str, int] = field(default_factory=dict)

    @property
    def faults(self) -> list[str]:
        """Messages of the simulated runtime, and the last line of a command that failed."""
        faults = FAULT.findall(self.output)
        if self.status != 0:
            lines = self.output.strip().splitlines() or ["no output"]
            faults.append(f"exit status {self.status}: {lines[-1]}")
        return faults

    def total(self, count: str) -> int:
        """Sum of "launches", "waves" or "wave_instructions" over all kernels."""
        return round(sum(use[count] for use in self.kernels.values()))

    def row(self) -> dict[str, Any]:
        """The columns of the table that every case has."""
        return {
            "seconds": round(self.seconds, 1),
            "kernels": len(self.kernels),
            "launches": self.total("launches"),
            "wave_instructions": self.total("wave_instructions"),
            "graph_launches": self.calls.get("hipGraphLaunch", 0),
            "faults": self.faults,
            "status": self.status,
        }


@dataclass(frozen=True)
class ProgramRun:
    """A run of a program of draw_hip.py, columns of its row, and the differences of its `SAME_SEED` images if any."""

    run: Run
    columns: dict[str, Any]
    pair: dict[str, Any] | None


@dataclass(frozen=True)
class Simulation:
    """A simulated GPU on which commands run, each with its report and a log in `folder`."""

    target: str
    folder: Path
    options: tuple[str, ...] = ()  # of scripts/amd/simulate: --only-hip, --kernels skip, ...
    environment: Mapping[str, str] = field(default_factory=dict)

    def run(self, name: str, command: Sequence[object], timeout: float = 1800, cwd: Path = ROOT) -> Run:
        """Run a command. `sd-ort` as its first word is this checkout's."""
        words = [str(word) for word in command]
        # Not -m sd_ort, which ends the process before the simulated runtime writes its report.
        sd_ort = [sys.executable, "-c", "from sd_ort.cli import main; main()"]
        program = sd_ort if words[0] == "sd-ort" else words[:1]
        reports = self.folder / f"{name}-reports"
        reports.mkdir(parents=True, exist_ok=True)
        for report in reports.iterdir():
            report.unlink()
        options = [*self.options, "--report", str(reports / "%p.json")]
        simulate = [sys.executable, str(SIMULATE), self.target, *options, "--", *program, *words[1:]]
        path = os.pathsep.join(filter(None, [str(cwd), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **self.environment}
        log = self.folder / f"{name}.log"
        begin = time.monotonic()
        with log.open("w") as output:
            streams: dict[str, Any] = {"stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
            process = subprocess.Popen(simulate, cwd=cwd, env=environment, **streams)
            try:
                status: int | None = process.wait(timeout)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                if process.poll() is None:  # the processes that it started end too
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        seconds = time.monotonic() - begin
        return Run(words, seconds, status, log.read_text(errors="replace"), *read_reports(reports))


def read_reports(folder: Path) -> tuple[dict[str, Counter[str]], Counter[str]]:
    """Uses of each kernel and numbers of HIP calls, summed over the reports of a folder."""
    kernels: dict[str, Counter[str]] = {}
    calls: Counter[str] = Counter()
    for path in sorted(folder.glob("*.json")):
        report = json.loads(path.read_text())
        calls.update(report["calls"])
        for name, use in report["kernels"].items():
            kernels.setdefault(name, Counter()).update(use)
    return kernels, calls


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes out that lock the same folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def compare_images(expected: Path, image: Path) -> dict[str, Any]:
    """Largest and mean difference of two images, of 255, and whether they are equal byte for byte."""
    arrays = [np.asarray(Image.open(path).convert("RGB"), np.int16) for path in (expected, image)]
    if arrays[0].shape != arrays[1].shape:
        raise SystemExit(f"{image} has shape {arrays[1].shape}, {expected} {arrays[0].shape}.")
    largest, mean = difference(*arrays)
    return {"largest": largest, "mean": mean, "equal": not largest}


def difference(expected: np.ndarray, image: np.ndarray) -> tuple[int, float]:
    """Return the largest and the mean difference of the pixels of two images."""
    distance = np.abs(expected - image)
    return int(distance.max()), round(float(distance.mean()), 3)


def parse_options(parser: argparse.ArgumentParser, name: str) -> argparse.Namespace:
    """Add the options of all runs, parse, and draw the reference images. `name`: that of the folder of models."""
    parser.add_argument("--timeout", type=float, default=1800, help="seconds of each case [%(default)s]")
    parser.add_argument("--work", type=Path, default=ROOT / "out" / name)
    parser.add_argument("--out", type=Path, default=ROOT / "results/amd")
    options = parser.parse_args()
    options.work = options.work.absolute()
    options.work.mkdir(parents=True, exist_ok=True)
    generate_references(options.work)
    return options


def generate_references(work: Path) -> None:
    """Generate the images of the CPU provider in float32 into WORK/cpu, unless they are there: sizes and LoRAs."""
    model, images, unfinished = work / "demo-float32", work / "cpu", work / "cpu.partial"
    if images.is_dir():
        return
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if not model.is_dir():
        optimize = [sys.executable, "-m", "sd_ort", "optimize", "demo", str(model), "--target", "cpu"]
        subprocess.run(optimize, env=environment, check=True)
    for name in ("sizes", "lora"):
        command = [sys.executable, str(DRAWING), name, str(model), str(unfinished), "cpu"]
        subprocess.run(command, env=environment, check=True)
    unfinished.rename(images)


def compare_with_reference(work: Path, image: Path, stem: str | None = None) -> dict[str, Any]:
    """Return the differences of an image from the CPU provider's image; empty if `image` does not exist.

    `stem`: the name of the CPU provider's image, by default that of `image`.
    """
    stem = stem or image.stem
    reference = work / f"cpu/{SAME_IMAGES.get(stem, stem)}.png"
    return compare_images(reference, image) if image.is_file() else {}


def run_program(run: Callable[..., Run], work: Path, name: str, model: Path, images: Path, provider: str) -> ProgramRun:
    """Run a program of draw_hip.py by `run(name, command)` and compare each of its images."""
    shutil.rmtree(images, ignore_errors=True)
    done = run(name, [sys.executable, DRAWING, name, model, images, provider])
    compared = {path.stem: compare_with_reference(work, path) for path in sorted(images.glob("*.png"))}
    columns: dict[str, Any] = {"images": compared}
    if compared:
        columns |= {key: max(each[key] for each in compared.values()) for key in ("largest", "mean")}
    first, second = (images / f"{stem}.png" for stem in SAME_SEED[name])
    pair = compare_images(first, second) if first.is_file() and second.is_file() else None
    return ProgramRun(done, columns, pair)


def compiled_by(name: str) -> str | None:
    """Return `the wheel`, or the compiler and the targets of the build whose library `name` is loaded; None without."""
    library = library_path(name)
    if library is None:
        return None
    if library.parent == SOURCES:
        return "the wheel"
    record = files.read_json(library.with_name("build.json"))
    compiler = re.search(r"clang version (\d+)", " ".join(record["compilers"]))
    return f"clang{f' {compiler[1]}' if compiler else ''} for {', '.join(record['hip'])}"


def image_faults(columns: Mapping[str, Any], dtype: str) -> list[str]:
    """Return what is wrong with the image of a row, or the worst of its images."""
    mean, limit = columns.get("mean", 0), MEAN_LIMIT[dtype]
    return [f"the image differs by {mean} of 255 in the mean, more than {limit}"] if mean > limit else []


def copy_pixels(image: Path, to: Path) -> None:
    """Copy an image without its metadata, which name the model's folder."""
    Image.open(image).convert("RGB").save(to)


class Table:
    """Rows of results in `path`.json and `path`.md, written after each row. A row replaces one with the same keys."""

    KEYS = ("target", "dtype", "libraries", "case")

    def __init__(
        self, path: Path, title: str, columns: Mapping[str, str], note: str = "", keys: Sequence[str] = KEYS
    ) -> None:
        """`columns`: key of a row -> heading. `note`: a paragraph above the table. `keys`: what tells rows apart."""
        self.path, self.title, self.columns, self.note, self.keys = path, title, columns, note, keys
        self.rows = self.stored()

    def stored(self) -> list[dict[str, Any]]:
        """The rows of the JSON file."""
        path = self.path.with_suffix(".json")
        return json.loads(path.read_text())["rows"] if path.is_file() else []

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row and write both files. Several processes may share them."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self.path.parent):
            self.rows = self.stored()
            key = self.key(row)
            position = next((i for i, each in enumerate(self.rows) if self.key(each) == key), len(self.rows))
            self.rows[position : position + 1] = [{"commit": machine.commit(), **row}]
            self.write()

    def key(self, row: Mapping[str, Any]) -> list[Any]:
        """Return the values that identify a table row."""
        return [row.get(name) for name in self.keys]

    def write(self) -> None:
        """Write the JSON file with everything, and the Markdown table."""
        record = {
            "title": self.title,
            "note": self.note,
            "machine": machine.machine(),
            "versions": machine.versions(),
            "rows": self.rows,
        }
        files.write_json(self.path.with_suffix(".json"), record)
        lines = [
            f"# {self.title}",
            "",
            *([self.note, ""] if self.note else []),
            "| " + " | ".join(self.columns.values()) + " |",
            "|" + "---|" * len(self.columns),
        ]
        lines += ["| " + " | ".join(text(row.get(key)) for key in self.columns) + " |" for row in self.rows]
        files.write_text(self.path.with_suffix(".md"), "\n".join(lines) + "\n")


def text(value: object) -> str:
    """A cell of the Markdown table."""
    if value is None or value == []:
        return ""
    if isinstance(value, list):
        return "; ".join(map(text, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value).replace("|", "/").replace(str(ROOT), ".").replace(str(Path.home()), "~")
