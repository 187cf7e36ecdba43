#!/usr/bin/env python3
"""Writes results/ops_amd_resources.md: registers, LDS, spills and occupancy of every kernel on every AMD architecture.

    python scripts/amd/amd_resources.py
    python scripts/amd/amd_resources.py gfx908    # another one: results/amd/resources_gfx908.md

Needs ROCm, or on Debian scripts/amd/install_hip_toolchain.sh.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from custom_ops import code_objects
from sd_ort.runtime import build

ROOT = Path(__file__).resolve().parents[2]
ARCHS = ("gfx90a", "gfx942", "gfx1100", "gfx1200", "gfx1201")


def main() -> None:
    (target,) = sys.argv[1:] or ("",)
    library = build.build(cpu=False, hip=(target,) if target else ARCHS, on_progress=print)
    with tempfile.TemporaryDirectory() as folder:
        kernels = code_objects.read_kernels(code_objects.extract(library, Path(folder)))
    path = ROOT / (f"results/amd/resources_{target}.md" if target else "results/ops_amd_resources.md")
    path.write_text(code_objects.table(kernels))
    spilling = [f"{kernel.name} {kernel.target}" for kernel in kernels if kernel.spills or kernel.scratch_bytes]
    print(f"{path}: {len(kernels)} kernels, {len(spilling)} spill {spilling}")


if __name__ == "__main__":
    main()
