#!/usr/bin/env python3
"""Runs every candidate of every custom GPU operator over every case, against NumPy float64, on this machine's GPU.

    python scripts/checks/check_ops_gpu.py --arch sm_90 --log results/ops_check_sm_90.txt
    compute-sanitizer --tool memcheck python scripts/checks/check_ops_gpu.py --arch sm_90 --one-case

Exits with 1 when a candidate fails. The large shapes that are timed are checked in float16, and only up to --limit
elements: NumPy takes minutes for more. Needs NumPy, ml_dtypes, CMake and nvcc or a ROCm install.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from math import prod
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from custom_ops import GPU_OPERATORS
from custom_ops.check import candidates
from custom_ops.check.memory import GUARD_BYTES, DeviceMemory
from custom_ops.libraries import GpuLibrary
from custom_ops.op import Case, Operator, load
from sd_ort.runtime import build


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", required=True, help="sm_90, gfx942, ...: what to build for")
    parser.add_argument("--library", type=Path, help="a library built before")
    parser.add_argument("--log", type=Path, help="write the table there too")
    parser.add_argument("--one-case", action="store_true", help="a small case of each kernel, for compute-sanitizer")
    parser.add_argument("--limit", type=int, default=12_000_000, help="largest input checked, in elements")
    parser.add_argument("--operators", nargs="*", default=GPU_OPERATORS)
    options = parser.parse_args()
    library = GpuLibrary(options.library or build.build_gpu(options.arch))
    memory = DeviceMemory(guard_bytes=0 if options.one_case else GUARD_BYTES)
    lines = [f"{options.arch}, library {library.c.sd_ort_build_hash().decode()}, every candidate against NumPy float64"]
    failures = 0
    for folder in options.operators:
        operator = load(folder)
        started = time.monotonic()
        outcomes: list[candidates.Outcome] = []
        for case, dtype, shift in calls(library, operator, options.one_case, options.limit):
            outcomes += candidates.check_case(library, memory, operator, case, dtype, shift)
        faults = [outcome for outcome in outcomes if outcome.fault]
        failures += len(faults)
        worst = max((outcome.error / outcome.limit for outcome in outcomes), default=0.0)
        names = {outcome.candidate for outcome in outcomes}
        lines.append(
            f"{operator.name:24} {len(outcomes):5} runs, {len(names):3} candidates, {len(faults)} faults, "
            f"worst NMSE {worst:.2f} of the limit, {time.monotonic() - started:.0f} s"
        )
        print(lines[-1], flush=True)
        lines += [f"  {fault}" for fault in faults]
        for fault in faults[:20]:
            print(f"  {fault}", flush=True)
        untimed = [case.name for case in operator.cases if case.benchmark and elements(case) > options.limit]
        if untimed and not options.one_case:
            lines.append(f"  not checked here, over {options.limit} elements: {', '.join(untimed)}")
    if options.log:
        options.log.parent.mkdir(exist_ok=True, parents=True)
        options.log.write_text("\n".join(lines) + "\n")
    return 1 if failures else 0


def elements(case: Case) -> int:
    return max(prod(shape) for shape in case.inputs.values())


def calls(library: GpuLibrary, operator: Operator, one_case: bool, limit: int) -> Iterator[tuple[Case, str, int]]:
    """Case, dtype and how many elements its buffers lie off 16-byte alignment."""
    small = [case for case in operator.cases if not case.benchmark]
    if one_case:
        for case in covering(library, operator, small):
            yield case, "float16", 0
        return
    for case in small:
        for dtype in case.dtypes:
            yield case, dtype, 0
    yield small[1], "float16", 1
    for case in operator.cases:
        if case.benchmark and elements(case) <= limit:
            yield case, "float16", 0


def covering(library: GpuLibrary, operator: Operator, cases: list[Case]) -> Iterator[Case]:
    """The largest case under 100 000 elements, and others until every candidate has met one that it takes."""
    met: set[int] = set()
    fitting = [case for case in cases if elements(case) < 100_000 and "float16" in case.dtypes]
    for case in sorted(fitting, key=elements, reverse=True):
        names = (*case.inputs, *operator.output_shapes(case))
        params = operator.params(case, "float16", dict.fromkeys(names, 1 << 20))  # aligned; nothing runs
        number = library.operator(operator.name, params)
        taken = {i for i in range(len(library.candidates(number))) if library.is_supported(number, i, params)}
        if taken - met:
            met |= taken
            yield case


if __name__ == "__main__":
    sys.exit(main())
