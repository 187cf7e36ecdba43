#!/usr/bin/env python3
"""Runs every candidate of every custom GPU operator over every case, against NumPy float64, on this machine's GPU.

    python scripts/checks/check_ops_gpu.py --arch sm_90 --log results/ops_check_sm_90.txt
    python scripts/checks/check_ops_gpu.py --arch sm_90 --operators multi_head_attention --seconds 40
    python scripts/checks/check_ops_gpu.py --arch sm_90 --operators multi_head_attention --share 0/8    # of 8 processes
    python scripts/checks/check_ops_gpu.py --arch sm_90 --operators group_norm skip_group_norm --overwrites
    python scripts/checks/check_ops_gpu.py --arch sm_90 --sanitizer memcheck --log results/ops_check_memcheck_sm_90.txt
    scripts/amd/simulate gfx1100 --tinygrad CHECKOUT -- .venv/bin/python scripts/checks/check_ops_gpu.py \\
        --arch gfx1100 --limit 20000 --log results/amd/operators_gfx1100.txt

Exits with 1 when a candidate fails. The large shapes that are timed are checked in float16, and only up to --limit
elements: NumPy takes minutes for more. Calls are taken in an order drawn once, the large ones last, and --seconds ends
an operator's check early, for vendors' libraries that take seconds for each new shape, most of them compiling: the log
says how many calls of how many were made, and which were slowest. --share I/N makes every Nth call, from the Ith on:
N processes at once, each with its share, make them all. --sanitizer makes a small call of every kernel of ours under
NVIDIA's compute-sanitizer (2 where that is not installed). Needs NumPy, ml_dtypes, CMake and nvcc or a ROCm install.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from math import inf, prod
from pathlib import Path

from custom_ops import GPU_OPERATORS
from custom_ops.check import candidates
from custom_ops.check.memory import GUARD_BYTES, DeviceMemory
from custom_ops.libraries import GpuLibrary
from custom_ops.operator_spec import CustomOperator, OperatorCase, load
from sd_ort.runtime import build


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", required=True, help="sm_90, gfx942, ...: what to build for")
    parser.add_argument("--library", type=Path, help="a library built before")
    parser.add_argument("--log", type=Path, help="write the table there too")
    parser.add_argument("--one-case", action="store_true", help="a small case of each kernel, for compute-sanitizer")
    parser.add_argument("--limit", type=int, default=12_000_000, help="largest input checked, in elements")
    parser.add_argument("--operators", nargs="*", default=GPU_OPERATORS)
    parser.add_argument("--seconds", type=float, default=inf, help="of an operator's check, about")
    parser.add_argument("--overwrites", action="store_true", help="the first output in the first input's place")
    parser.add_argument("--share", default="0/1", metavar="I/N", help="every Nth call, from the Ith on")
    parser.add_argument("--sanitizer", metavar="TOOL", help="memcheck, racecheck, initcheck or synccheck")
    options = parser.parse_args()
    if options.sanitizer:
        return sanitize(options)
    library = GpuLibrary(options.library or build.build_gpu(options.arch))
    memory = DeviceMemory(guard_bytes=0 if options.one_case else GUARD_BYTES)
    device = f"{options.arch}, simulated" if "SIMULATED_HIP_TARGET" in os.environ else options.arch
    lines = [f"{device}, library {library.c.sd_ort_build_hash().decode()}, every candidate against NumPy float64"]
    failures = 0
    for folder in options.operators:
        operator = load(folder)
        started = time.monotonic()
        outcomes: list[candidates.CandidateResult] = []
        selected = calls(operator, options.limit) if not options.one_case else covering(library, operator)
        first, step = map(int, options.share.split("/"))
        selected = selected[first::step]
        took: list[tuple[float, str]] = []
        for case, dtype, shift in selected:
            if time.monotonic() - started > options.seconds:
                break
            begun = time.monotonic()
            outcomes += candidates.check_case(
                library,
                memory,
                operator,
                case,
                dtype,
                shift,
                skip_vendor_libraries=options.one_case,
                alias_output=options.overwrites,
            )
            took.append((time.monotonic() - begun, f"{case.name} {dtype}"))
        faults = [outcome for outcome in outcomes if outcome.failure]
        failures += len(faults)
        worst = max((outcome.error / outcome.limit for outcome in outcomes), default=0.0)
        names = {outcome.candidate for outcome in outcomes}
        calls_made = f"{len(took):4} of {len(selected):4} calls"
        lines.append(
            f"{operator.name:24} {calls_made}, {len(outcomes):5} runs, {len(names):3} candidates, "
            f"{len(faults)} faults, worst NMSE {worst:.2f} of the limit, {time.monotonic() - started:.0f} s"
        )
        if len(took) < len(selected):
            lines[-1] += ", slowest: " + ", ".join(f"{name} {seconds:.1f} s" for seconds, name in sorted(took)[:-4:-1])
        print(lines[-1], flush=True)
        lines += [f"  {fault}" for fault in faults]
        for fault in faults[:20]:
            print(f"  {fault}", flush=True)
        untimed = [case.name for case in operator.cases if case.benchmark and elements(case) > options.limit]
        if untimed and not options.one_case:
            lines.append(f"  not checked here, over {options.limit} elements: {', '.join(untimed)}")
    write(options.log, lines)
    return 1 if failures else 0


def elements(case: OperatorCase) -> int:
    return max(prod(shape) for shape in case.inputs.values())


def calls(operator: CustomOperator, limit: int) -> list[tuple[OperatorCase, str, int]]:
    """OperatorCase, dtype and how many elements its buffers lie off 16-byte alignment; the large ones last."""
    small = [case for case in operator.cases if not case.benchmark]
    calls = [(case, dtype, 0) for case in small for dtype in case.dtypes]
    calls.append((small[1], "float16", 1))
    random.Random(0).shuffle(calls)
    large = [case for case in operator.cases if case.benchmark and elements(case) <= limit]
    return calls + [(case, "float16", 0) for case in sorted(large, key=elements)]


def covering(library: GpuLibrary, operator: CustomOperator) -> list[tuple[OperatorCase, str, int]]:
    """Return calls that cover every candidate of ours: the largest case under 100 000 elements, then others."""
    met: set[int] = set()
    calls: list[tuple[OperatorCase, str, int]] = []
    fitting = [
        case for case in operator.cases if not case.benchmark and elements(case) < 100_000 and "float16" in case.dtypes
    ]
    for case in sorted(fitting, key=elements, reverse=True):
        names = (*case.inputs, *operator.output_shapes(case))
        params = operator.params(case, "float16", dict.fromkeys(names, 1 << 20))  # aligned; nothing runs
        number = library.operator(operator.name, params)
        ours = [i for i, name in enumerate(library.candidates(number)) if not candidates.is_vendor_library(name)]
        supported = {i for i in ours if library.is_supported(number, i, params)}
        if supported - met:
            met |= supported
            calls.append((case, "float16", 0))
    return calls


def sanitize(options: argparse.Namespace) -> int:
    """Run a small call of every kernel under compute-sanitizer and return the worst exit code.

    Each operator runs in a process of its own. Reports of faults are printed whole.
    """
    tool = next(filter(None, map(shutil.which, ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer"))), None)
    if tool is None:
        print("compute-sanitizer is not on this machine: it comes with the CUDA toolkit (cuda-sanitizer)")
        return 2
    library = options.library or build.build_gpu(options.arch)
    first = f"{options.arch}, library {GpuLibrary(library).c.sd_ort_build_hash().decode()}"
    lines = [f"{first}, a small call of every kernel of ours under compute-sanitizer's {options.sanitizer}"]

    def check(operator: str) -> tuple[int, str]:
        command = [sys.executable, __file__, "--arch", options.arch, "--library", str(library), "--one-case"]
        command += ["--operators", operator, "--seconds", str(options.seconds)]
        under = [tool, "--tool", options.sanitizer, "--error-exitcode", "1"]
        done = subprocess.run([*under, *command], check=False, text=True, capture_output=True)
        return done.returncode, done.stdout + done.stderr

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        results = list(pool.map(check, options.operators))
    for operator, (code, output) in zip(options.operators, results, strict=True):
        summary = [line.lstrip("= ") for line in output.splitlines() if " calls, " in line or "SUMMARY" in line]
        lines.append("; ".join(summary) if code == 0 and summary else f"{operator}: exit code {code}\n{output}")
    print("\n".join(lines), flush=True)
    write(options.log, lines)
    return max((code for code, _ in results), key=abs)


def write(log: Path | None, lines: list[str]) -> None:
    if log:
        log.parent.mkdir(exist_ok=True, parents=True)
        log.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
