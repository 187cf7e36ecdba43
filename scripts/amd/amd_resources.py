#!/usr/bin/env python3
"""Writes results/ops_amd_resources.md: registers, LDS, spills and occupancy of every kernel on every AMD architecture.

    python scripts/amd/amd_resources.py
    python scripts/amd/amd_resources.py WHEEL    # results/amd/resources_wheel.md, of one by scripts/build_wheels --hip

Needs ROCm, or on Debian scripts/amd/install_hip_toolchain.sh, with --wheel for a wheel.

Exits with 1 if a kernel spills.
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from custom_ops import code_objects
from sd_ort.runtime import build
from sd_ort.runtime.library import PROVIDER_LIBRARIES

ROOT = Path(__file__).resolve().parents[2]
ARCHS = ("gfx90a", "gfx942", "gfx1100", "gfx1200", "gfx1201")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        if wheel := sys.argv[1:]:
            path = ROOT / "results/amd/resources_wheel.md"
            library = provider_library(Path(wheel[0]), Path(folder))
        else:
            path = ROOT / "results/ops_amd_resources.md"
            library = build.build(cpu=False, hip=ARCHS, on_progress=print)
        kernels = code_objects.read_kernels(code_objects.extract(library, Path(folder)))
    path.write_text(code_objects.table(kernels))
    spilling = [f"{kernel.name} {kernel.target}" for kernel in kernels if kernel.spills or kernel.scratch_bytes]
    print(f"{path}: {len(kernels)} kernels, {len(spilling)} spill {spilling}")
    sys.exit(bool(spilling))


def provider_library(wheel: Path, folder: Path) -> Path:
    """Extract the library of a wheel that has the kernels for AMD, and return its path."""
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"custom_ops/{PROVIDER_LIBRARIES['hip']}", folder))


if __name__ == "__main__":
    main()
