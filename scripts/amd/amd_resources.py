#!/usr/bin/env python3
"""Writes results/ops_amd_resources.md: registers, LDS, spills and occupancy of every kernel on every AMD architecture.

    python scripts/amd/amd_resources.py
    python scripts/amd/amd_resources.py --sources custom_ops/operators/quantized_linear/kernels/quantized_linear.hip
    python scripts/amd/amd_resources.py WHEEL    # results/amd/resources_wheel.md, of one by scripts/build_wheels --hip

--sources compiles only these files and replaces the rows of their kernels: seconds instead of minutes.

Needs ROCm, or on Debian scripts/amd/install_hip_toolchain.sh, with --wheel for a wheel.

Exits with 1 if a kernel spills.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from custom_ops import code_objects
from sd_ort.runtime import build
from sd_ort.runtime.library import PROVIDER_LIBRARIES

ROOT = Path(__file__).resolve().parents[2]
ARCHS = ("gfx90a", "gfx942", "gfx1100", "gfx1200", "gfx1201")
# Those of custom_ops/CMakeLists.txt that decide about machine code; a test compares.
FLAGS = ("-std=c++17", "-O3", "-D__HIP_PLATFORM_AMD__", "-ffp-contract=fast")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", nargs="?", type=Path, help="wheel with kernels for AMD [the sources are compiled]")
    parser.add_argument("--sources", nargs="+", type=Path, help="compile only these .hip files")
    options = parser.parse_args()
    if options.wheel and options.sources:
        parser.error("--sources compiles files: a wheel cannot be given too.")
    path = ROOT / ("results/amd/resources_wheel.md" if options.wheel else "results/ops_amd_resources.md")
    with tempfile.TemporaryDirectory() as folder:
        if options.sources:
            libraries = compile_sources(options.sources, Path(folder))
        elif options.wheel:
            libraries = [provider_library(options.wheel, Path(folder))]
        else:
            libraries = [build.build(cpu=False, hip=ARCHS, on_progress=print)]
        kernels = []
        for library in libraries:
            kernels += code_objects.read_kernels(code_objects.extract(library, Path(folder)))
    table = code_objects.table(kernels)
    path.write_text(replace_rows(path.read_text(), table) if options.sources else table)
    spilling = [f"{kernel.name} {kernel.target}" for kernel in kernels if kernel.spills or kernel.scratch_bytes]
    print(f"{path}: {len(kernels)} kernels, {len(spilling)} spill {spilling}")
    sys.exit(bool(spilling))


def compile_sources(sources: Sequence[Path], folder: Path) -> list[Path]:
    """Compile files of kernels for ARCHS with the flags of custom_ops/CMakeLists.txt, and return the objects' paths."""
    compiler = build.find_hip_compiler()
    targets = [f"--offload-arch={target}" for target in ARCHS]
    objects = []
    for source in sources:
        objects.append(folder / f"{source.stem}.o")
        flags = [*FLAGS, "-fPIC", "-fvisibility=hidden", f"-I{ROOT / 'custom_ops'}"]
        words = [*compiler.flags, *targets, *flags, "-x", "hip", "-c", str(source)]
        subprocess.run([compiler.path, *words, "-o", str(objects[-1])], check=True)
    return objects


def replace_rows(old: str, new: str) -> str:
    """Return the table `old` with the rows of `new` in place of all rows of the same kernel templates."""

    def rows(table: str) -> list[str]:
        return [line for line in table.splitlines() if line.startswith("| ") and not line.startswith("| kernel |")]

    heading = old[: old.index(rows(old)[0])]
    if heading != new[: new.index(rows(new)[0])]:
        raise ValueError("The tables have other columns. Run amd_resources.py without --sources.")
    templates = {row.split("<")[0] for row in rows(new)}
    other_rows = [row for row in rows(old) if row.split("<")[0] not in templates]
    return heading + "".join(f"{row}\n" for row in sorted([*other_rows, *rows(new)]))


def provider_library(wheel: Path, folder: Path) -> Path:
    """Extract the library of a wheel that has the kernels for AMD, and return its path."""
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"custom_ops/{PROVIDER_LIBRARIES['hip']}", folder))


if __name__ == "__main__":
    main()
