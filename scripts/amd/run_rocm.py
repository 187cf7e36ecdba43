"""Run sd-ort's commands with --provider rocm on the simulated AMD GPU, and keep what each did.

    python scripts/amd/run_rocm.py --arch gfx1100 gfx942 --out results/amd

onnxruntime-rocm executes its own kernels. Our operator library is built with ROCm 7's headers, as onnxruntime-rocm is:
two versions of the HIP runtime in one process are refused. Images are compared with those of the CPU provider in
float32 from the same seed. `rocm.json` and `rocm.md` are written after each case; a case in them is replaced. Models,
logs and images of a run lie in --work.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from scripts.amd.draw_hip import GUIDANCE, PROMPT, STEPS
from scripts.amd.rocm_headers import rocm_headers
from scripts.amd.rocm_wheel import rocm_wheel
from scripts.amd.simulated_rocm.build import build
from scripts.amd.simulated_runs import (
    ROOT,
    SAME_SEED,
    Run,
    Simulation,
    Table,
    compare_images,
    compare_with_reference,
    compiled_by,
    copy_pixels,
    image_faults,
    parse_options,
    run_program,
)
from sd_ort.core.cache import cache_folder
from sd_ort.runtime.library import HIP_LIBRARY, library_path

NOTE = """No AMD GPU was used. Each case ran under `scripts/amd/simulate`: HIP, hipBLAS and MIOpen are simulated in host
memory, and kernels, those of the unchanged onnxruntime-rocm 1.22.2 wheel included, are the real machine code of the
GPU, executed by tinygrad's emulator. Times are those of this emulation on a busy CPU, and say nothing about a GPU.
Differences are from images of the CPU provider in float32, in steps of 1/255. *Operators of* names the compiler and the
targets of our operators' GPU library, which `build-ops` made, or the tests did, by the same code and from the same
sources; it is empty for older rows, of `build-ops` by clang 19.

Runs of one case differ, as `again-0` from `square-0` does: `sizes` on gfx942, run three times, had 16, 8 and 6 as the
largest difference, each in the batch's second image, and means of 0.152 to 0.18."""
TITLE = "`--provider rocm` with onnxruntime-rocm's own kernels: simulated runtime, no GPU"
COLUMNS = {
    "target": "simulated GPU",
    "case": "case",
    "command": "command",
    "seconds": "s",
    "kernels": "kernels",
    "launches": "launches",
    "captured": "launches of captured graphs",
    "largest": "largest difference of 255",
    "mean": "mean difference",
    "verdict": "verdict",
    "note": "",
    "compiled": "operators of",
    "commit": "commit",
}
CLIENT = ROOT / "tests/amd/rocm_wheel_client.py"
PLACED = ("unet_prompt", "unet_time", "unet", "vae_decoder")
CPU_ARITHMETIC = {"Shape", "Concat", "Gather", "Slice", "Mul", "Add", "Cast", "Unsqueeze", "Squeeze"}  # of shapes
PLAIN_SIZE = ("--height", 64, "--width", 64)
SIZE = ("--steps", STEPS, "--guidance", GUIDANCE, *PLAIN_SIZE, "--seed", 0)
IMAGES = {
    "sizes": {"square-0", "wide-0", "batch-0", "batch-1", "again-0"},
    "lora": {"before-0", "full-0", "half-0", "after-0"},
}


def rocm_tree(folder: Path, libraries: Path) -> Path:
    """Return a ROCm 7 installation as `build-ops` expects one: Debian's clang, ROCm's headers, simulated libraries."""
    tree, debian = folder / "rocm", cache_folder() / "hip-tree"
    if not (debian / "amdgcn").is_dir():
        raise SystemExit("Kernels are compiled with Debian's clang 19: run scripts/amd/install_hip_toolchain.sh.")
    links = {
        "llvm": Path("/usr/lib/llvm-19"),
        "amdgcn": debian / "amdgcn",
        "include": cache_folder() / "rocm-headers/7.2.4/include",
        "lib": libraries,
    }
    version = "HIP_VERSION_MAJOR=7\nHIP_VERSION_MINOR=2\nHIP_VERSION_PATCH=4\n"
    for path in ("bin/.hipVersion", "share/hip/version"):
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(version)
    for name, target in links.items():
        (tree / name).unlink(missing_ok=True)
        (tree / name).symlink_to(target)
    return tree


class RocmRun:
    """All cases of one target."""

    def __init__(self, target: str, work: Path, table: Table, timeout: float, environment: Mapping[str, str]) -> None:
        self.target, self.work, self.table, self.timeout = target, work, table, timeout
        self.folder, self.model = work / target, work / "demo"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.environment = {**environment, "SD_ORT_TUNING": str(self.folder / "no-tuning")}
        self.cases: dict[str, Callable[[], bool]] = {
            "build": self.build,
            "optimize": self.optimize,
            "doctor": self.doctor,
            "explain": self.explain,
            "placement": self.placement,
            "generate": partial(self.generate, "generate"),
            "no-graph": partial(self.generate, "no-graph", "--no-graph"),
            "sizes": partial(self.program, "sizes"),
            "lora": partial(self.program, "lora"),
            "benchmark": self.benchmark,
            "benchmark-raw": self.benchmark_raw,
            "benchmark-again": self.benchmark_again,
            "tuned": self.tuned,
        }

    def list_cases(self) -> None:
        """Add a row for each case that the table lacks."""
        present = {row["case"] for row in self.table.rows if row["target"] == self.target}
        for case in self.cases:
            if case not in present and (case != "optimize" or not self.model.is_dir()):
                self.table.add({"target": self.target, "case": case, "verdict": "not run"})

    def run(self, case: str, command: Iterable[object], *options: str, tuning: str | None = None) -> Run:
        """Run a command on the simulated GPU; `tuning` is the folder of its tuning file."""
        print(f"{self.target}: {case} ...", flush=True)
        environment = {**self.environment, **({"SD_ORT_TUNING": str(self.folder / tuning)} if tuning else {})}
        return Simulation(self.target, self.folder, options, environment).run(case, list(command), self.timeout)

    def add(self, case: str, run: Run, fault: str = "", **columns: Any) -> bool:
        """Add a row; returns whether the command ended well and there is no `fault`."""
        faults = [*run.faults, *filter(None, [fault]), *image_faults(columns, "float16")]
        command = re.sub(r"\S*/(?=\S)", "", " ".join(run.command))
        row = {"target": self.target, "case": case, "command": command, **run.row(), **columns}
        row |= {
            "wheel": rocm_wheel().name,
            "compiled": compiled_by(HIP_LIBRARY),
            "captured": row.pop("graph_launches"),
            "faults": faults,
            "verdict": faults or "simulated runtime: ran",
        }
        self.table.add(row)
        print(f"{self.target}: {case}: {run.seconds:.0f} s {columns} {'; '.join(faults)}", flush=True)
        return not faults

    def build(self) -> bool:
        """`sd-ort build-ops --hip TARGET`, from the cache if it is there."""
        return self.add("build", self.run("build", ["sd-ort", "build-ops", "--hip", self.target, "--no-provider"]))

    def optimize(self) -> bool:
        """`sd-ort optimize demo`, once for all targets."""
        if self.model.is_dir():
            return True
        command = ["sd-ort", "optimize", "demo", self.model, "--float16", "--target", "rocm"]
        return self.add("optimize", self.run("optimize", command))

    def doctor(self) -> bool:
        """`sd-ort doctor`: the row of this provider."""
        run = self.run("doctor", ["sd-ort", "doctor"])
        return self.add("doctor", run, note=[line for line in run.output.splitlines() if line.startswith("rocm ")])

    def explain(self) -> bool:
        """`sd-ort explain --provider rocm`."""
        run = self.run("explain", ["sd-ort", "explain", self.model, "--provider", "rocm"])
        return self.add("explain", run, note=[line for line in run.output.splitlines() if "CPU" in line])

    def placement(self) -> bool:
        """Nodes that the session itself executed, by provider and operator."""
        run = self.run("placement", [sys.executable, CLIENT, "placement", self.model, library_path(), *PLACED])
        if run.status != 0:
            return self.add("placement", run)
        placed = json.loads(run.output.splitlines()[-1])
        faults, notes = [], []
        for name, providers in placed.items():
            on_gpu, on_cpu = (providers.get(f"{each}ExecutionProvider", {}) for each in ("ROCM", "CPU"))
            faults += [f"{name}: {op}" for op in on_gpu if op.startswith("Memcpy")]
            faults += [f"{name}: {op} on the CPU" for op in on_cpu if op not in CPU_ARITHMETIC]
            of_shapes = f" and {sum(on_cpu.values())} of shapes on the CPU" if on_cpu else ""
            notes.append(f"{name}: {sum(on_gpu.values())} nodes on the GPU{of_shapes}, no copy")
        return self.add("placement", run, "; ".join(faults), note=notes, placed=placed)

    def generate(self, case: str, *options: object, tuning: str | None = None) -> bool:
        """`sd-ort generate`, compared with the CPU provider in float32 and with the image of `generate`."""
        image, first = (self.folder / f"{name}.png" for name in (case, "generate"))
        image.unlink(missing_ok=True)
        command = ["sd-ort", "generate", PROMPT, "--model", self.model, "--provider", "rocm", *SIZE, *options]
        run = self.run(case, [*command, "--overwrite", "--out", image], tuning=tuning)
        columns = compare_with_reference(self.work, image, "square-0")
        if case != "generate" and image.is_file() and first.is_file():
            difference = compare_images(first, image)
            columns["note"] = f"{difference['largest']} of 255 from `generate`'s image" * (not difference["equal"])
            columns["note"] = columns["note"] or "equal to `generate`'s image"
        return self.add(case, run, "" if columns else "no image", **columns)

    def program(self, name: str) -> bool:
        """A program of draw_hip.py: each of its images is compared."""
        ran = run_program(self.run, self.work, name, self.model, self.folder / name, "rocm")
        compared = ran.columns["images"]
        ran.columns["note"] = [f"{stem} {each['largest']}" for stem, each in compared.items()]
        if ran.pair is not None:
            first, second = SAME_SEED[name]
            ran.columns["note"].append(f"{second} is {ran.pair['largest']} of 255 from {first}")
        return self.add(name, ran.run, "" if set(compared) == IMAGES[name] else "images are missing", **ran.columns)

    def benchmark(self) -> bool:
        """`sd-ort benchmark --tuning` of our engine, which keeps its tuning results."""
        shutil.rmtree(self.folder / "tuning", ignore_errors=True)
        return self._benchmark("benchmark", "ours", self.model)

    def benchmark_again(self) -> bool:
        """The same once more, which loads them."""
        return self._benchmark("benchmark-again", "ours", self.model)

    def benchmark_raw(self) -> bool:
        """The same with the raw export beside ours: a message where onnxruntime-rocm's Softmax is wrong."""
        raw = self.work / "demo-raw"
        if not raw.is_dir():
            export = ["sd-ort", "export", "demo", raw]
            run = self.run("export", export)
            if run.status != 0:
                return self.add("export", run)
        return self._benchmark("benchmark-raw", "raw,ours", raw, self.model)

    def _benchmark(self, case: str, engines: str, *models: Path) -> bool:
        command = ["sd-ort", "benchmark", *models, "--provider", "rocm", "--tuning", "--engines", engines]
        command += ["--torch", "none", "--steps", 1, *PLAIN_SIZE, "--warmup", 0, "--runs", 1]
        run = self.run(case, [*command, "--out", self.folder / case], tuning="tuning")
        results = sorted((self.folder / "tuning").glob("*.json"))
        notes = re.findall(r"^(?:fused|raw) .*$|^.*Softmax.*$", run.output, re.MULTILINE)
        fault = "" if results else "no tuning file"
        return self.add(case, run, fault, note=[f"tuning file {each.name}" for each in results] + notes)

    def tuned(self) -> bool:
        """`sd-ort generate` with the tuning results of `benchmark`."""
        return self.generate("tuned", tuning="tuning")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=["gfx1100", "gfx942"])
    parser.add_argument("--cases", nargs="+", help="some of the cases")
    options = parse_options(parser, "run_rocm")
    work = options.work
    libraries = build(cache_folder() / "simulated_rocm", rocm_headers()[-1])
    environment = {
        "PYTHONPATH": os.pathsep.join(map(str, (rocm_wheel(), ROOT))),
        "ROCM_PATH": str(rocm_tree(work, libraries)),
    }
    table = Table(options.out / "rocm", TITLE, COLUMNS, NOTE)
    runs = [RocmRun(target, work, table, options.timeout, environment) for target in options.arch]
    for run in runs:
        run.list_cases()
    failed = []
    for run in runs:
        cases = options.cases or run.cases
        failed += [f"{run.target}: {case}" for case in cases if not run.cases[case]()]
        image = run.folder / "generate.png"
        if image.is_file():
            copy_pixels(image, options.out / f"rocm-{run.target}.png")
    if failed:
        raise SystemExit("Failed: " + "; ".join(failed))


if __name__ == "__main__":
    main()
