"""Run sd-ort on the simulated AMD GPU by the commands of its documentation, and store the result of each.

    python scripts/amd/run_hip.py --arch gfx1100 gfx942 --dtype float16 --out results/amd
    python scripts/amd/run_hip.py --arch gfx1100 --without-hipblaslt --cases generate
    unzip -j WHEEL 'custom_ops/*.so' -d custom_ops    # of scripts/build_wheels --hip: its kernels, if none are built

Each case is a process of its own under scripts/amd/simulate. Images are compared with those that the CPU provider draws
in float32 from the same seed. `hip.json` and `hip.md` are written after each case; a case in them is replaced. Models,
logs and images of a run lie in --work.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.amd.draw_hip import GUIDANCE, PROMPT, STEPS
from scripts.amd.simulated_runs import (
    ROOT,
    SAME_SEED,
    Run,
    Simulation,
    Table,
    compare_with_reference,
    compiled_by,
    copy_pixels,
    image_faults,
    parse_options,
    run_program,
)
from sd_ort.runtime.library import PROVIDER_LIBRARIES

TITLE = "`--provider hip` on a simulated AMD GPU"
NOTE = """No AMD GPU was used. Each case ran under `scripts/amd/simulate`: HIP and hipBLASLt are simulated in host
memory, and kernels are the real machine code of the GPU, executed by tinygrad's emulator, unless the case says that
they were skipped. *Kernels of* names the wheel, whose targets clang 22 compiled, or the compiler and the targets of a
build in the cache. `build-ops` made that build, or the tests did, by the same code and from the same sources. Rows
without a name are by clang 19. Seconds are those of this emulation on a busy CPU, and say nothing about a GPU.
Differences are from images of the CPU provider in float32, in steps of 1/255. Graph launches are launches of captured
HIP graphs.

The largest difference of `sizes` is that of seed 1, the second image of the batch. It is rounding: PyTorch's images of
this seed on a CPU are as far from float32, in the batch and alone ([table](batch_rounding.md))."""
COLUMNS = {
    "target": "simulated GPU",
    "dtype": "dtype",
    "libraries": "libraries",
    "case": "case",
    "seconds": "s",
    "kernels": "kernels",
    "launches": "launches",
    "wave_instructions": "wave instructions",
    "graph_launches": "graph launches",
    "largest": "largest difference of 255",
    "mean": "mean difference",
    "note": "",
    "faults": "faults",
    "compiled": "kernels of",
    "commit": "commit",
}
SIZE = ("--steps", STEPS, "--guidance", GUIDANCE, "--height", 64, "--width", 64, "--seed", 0)
PROGRAMS = ("sizes", "threads", "lora")
# Put in front of first_numbers' sd-ort: images of 64x64 in two steps, and sd15-tiny in place of Stable Diffusion 1.5.
# An emulator executes all kernels.
SHORTENED = """case "$*" in
  "export --preset sd15 "*) set -- export --preset sd15-tiny "${@:4}" ;;
  "generate "*) set -- "$@" --steps 2 --height 64 --width 64 ;;
  "benchmark out/amd/"*) set -- "$@" --steps 2 --warmup 0 --runs 1 --height 64 --width 64 ;;
esac
"""
CASES = ("build", "optimize", "doctor", "generate", *PROGRAMS, "benchmark", "tune", "tuned", "first_numbers")


@dataclass
class HipRun:
    """All cases of one target, dtype and set of libraries."""

    target: str
    targets: tuple[str, ...]
    dtype: str
    has_blas: bool
    work: Path
    table: Table
    timeout: float

    def __post_init__(self) -> None:
        libraries = "hipBLASLt" if self.has_blas else "HIP alone"
        self.labels = {"target": self.target, "dtype": self.dtype, "libraries": libraries}
        self.folder = self.work / f"{self.target}-{self.dtype}-{'blas' if self.has_blas else 'alone'}"
        self.model = self.work / f"demo-{self.dtype}"
        options = () if self.has_blas else ("--only-hip",)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.simulation = Simulation(self.target, self.folder, options, {"SD_ORT_TUNING": str(self.folder / "tuning")})

    def run(self, case: str, command: Iterable[object], timeout: float | None = None) -> Run:
        """Run a command on the simulated GPU."""
        print(f"{self.folder.name}: {case} ...", flush=True)
        return self.simulation.run(case, list(command), timeout or self.timeout)

    def add(self, case: str, run: Run, **columns: Any) -> bool:
        """Add a row; returns whether the command ended well."""
        row = {**self.labels, "case": case, **run.row(), **columns, "compiled": compiled_by(PROVIDER_LIBRARIES["hip"])}
        row["faults"] = faults = [*run.faults, *image_faults(columns, self.dtype)]
        self.table.add(row)
        print(f"{self.folder.name}: {case}: {run.seconds:.0f} s {columns} {'; '.join(faults)}", flush=True)
        return not faults

    def build(self) -> bool:
        """`sd-ort build-ops --hip` for all targets of this run, from the cache if it is there."""
        return self.add("build-ops", self.run("build-ops", ["sd-ort", "build-ops", "--hip", *self.targets]))

    def optimize(self) -> bool:
        """`sd-ort optimize demo`, once for all targets."""
        if self.model.is_dir():
            return True
        command = ["sd-ort", "optimize", "demo", self.model, f"--{self.dtype}", "--target", "hip"]
        return self.add("optimize", self.run("optimize", command))

    def doctor(self) -> bool:
        """`sd-ort doctor`: the row of this provider."""
        run = self.run("doctor", ["sd-ort", "doctor"])
        lines = [line for line in run.output.splitlines() if line.startswith("hip ")]
        return self.add("doctor", run, note=lines)

    def generate(self) -> bool:
        """`sd-ort generate`, compared with the CPU provider in float32."""
        return self._generate("generate", "generate")

    def _generate(self, name: str, label: str) -> bool:
        image = self.folder / f"{name}.png"
        command = ["sd-ort", "generate", PROMPT, "--model", self.model, "--provider", "hip", *SIZE]
        run = self.run(name, [*command, "--overwrite", "--out", image])
        return self.add(label, run, **compare_with_reference(self.work, image, "square-0"))

    def program(self, name: str) -> bool:
        """A program of draw_hip.py: each of its images is compared."""
        ran = run_program(self.run, self.work, name, self.model, self.folder / name, "hip")
        if ran.pair is not None:
            first, second = SAME_SEED[name]
            ran.columns["note"] = f"{first} and {second} are {'' if ran.pair['equal'] else 'NOT '}equal"
        return self.add(name, ran.run, **ran.columns)

    def benchmark(self) -> bool:
        """`sd-ort benchmark` of whole images, one step."""
        command = ["sd-ort", "benchmark", self.model, "--provider", "hip", "--torch", "none"]
        size = ["--steps", 1, "--height", 64, "--width", 64, "--runs", 1]
        run = self.run("benchmark", [*command, *size, "--out", self.folder / "benchmark"])
        return self.add("benchmark", run)

    def tune(self) -> bool:
        """`sd-ort tune` of the U-Net."""
        command = ["sd-ort", "tune", self.model, "--provider", "hip", "--height", 64, "--width", 64]
        run = self.run("tune", [*command, "--component", "unet"])
        summary = re.findall(r"\d+ (?:results|calls|shapes)[^\n]*", run.output)
        return self.add("tune", run, note=summary[-1:])

    def tuned(self) -> bool:
        """`sd-ort generate` with the results of `tune`."""
        return self._generate("tuned", "generate, tuned")

    def first_numbers(self) -> bool:
        """scripts/amd/first_numbers in a new clone of the last commit, with what SHORTENED changes."""
        checkout = self.work / "checkout"
        shutil.rmtree(checkout, ignore_errors=True)
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(checkout)], check=True)
        programs = checkout / ".venv/bin"
        programs.mkdir(parents=True)
        for name, script in {"python": 'exec {} "$@"', "sd-ort": SHORTENED + 'exec {} -m sd_ort "$@"'}.items():
            (programs / name).write_text("#!/bin/bash\n" + script.replace("{}", sys.executable) + "\n")
            (programs / name).chmod(0o755)
        simulation = Simulation(self.target, self.folder, self.simulation.options)
        print(f"{self.folder.name}: first_numbers ...", flush=True)
        run = simulation.run("first_numbers", ["scripts/amd/first_numbers", self.target], self.timeout, checkout)
        results = checkout / f"results/amd/first_numbers_{self.target}"
        files = sorted(str(path.relative_to(results)) for path in results.glob("**/*") if path.is_file())
        note = [
            "64x64, two steps, one run; sd15-tiny in place of Stable Diffusion 1.5; all kernels run",
            run.output.strip().splitlines()[-1],
            *files,
        ]
        if not (results / "sd15_vae/benchmark.json").is_file():
            note.append("not whole")
        return self.add("first_numbers", run, note=note)

    def case(self, name: str) -> bool:
        method: Callable[[], bool] = (lambda: self.program(name)) if name in PROGRAMS else getattr(self, name)
        return method()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=["gfx1100", "gfx942", "gfx1201"])
    parser.add_argument("--dtype", nargs="+", choices=("float16", "bfloat16"), default=["float16"])
    parser.add_argument("--without-hipblaslt", action="store_true", help="with libamdhip64 alone")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parse_options(parser, "hip")
    table = Table(options.out / "hip", TITLE, COLUMNS, NOTE)
    failed = []
    for target in options.arch:
        for dtype in options.dtype:
            runs = HipRun(
                target, tuple(options.arch), dtype, not options.without_hipblaslt, options.work, table, options.timeout
            )
            failed += [f"{target} {dtype}: {name}" for name in options.cases if not runs.case(name)]
            image = runs.folder / "generate.png"
            if image.is_file():
                copy_pixels(image, options.out / f"hip-{runs.folder.name}.png")
    if failed:
        raise SystemExit("Failed: " + "; ".join(failed))


if __name__ == "__main__":
    main()
