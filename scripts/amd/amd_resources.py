#!/usr/bin/env python3
"""Writes results/ops_amd_resources.md: registers, LDS, spills and occupancy of every kernel on every AMD architecture.

    python scripts/amd/amd_resources.py

Needs ROCm, or on Debian scripts/amd/install_hip_toolchain.sh.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from custom_ops import code_objects
from sd_ort.runtime import build

ROOT = Path(__file__).resolve().parents[2]
ARCHS = ("gfx90a", "gfx942", "gfx1100", "gfx1200", "gfx1201")


def main() -> None:
    library = build.build(cpu=False, hip=ARCHS, say=print)
    kernels = json.loads((library.parent / "kernels.json").read_text())["kernels"]
    path = ROOT / "results/ops_amd_resources.md"
    path.write_text(code_objects.table(kernels))
    spills = ("vgpr_spills", "sgpr_spills", "scratch_bytes")
    spilling = [f"{entry['symbol']} {entry['arch']}" for entry in kernels if any(entry[name] for name in spills)]
    print(f"{path}: {len(kernels)} kernels, {len(spilling)} spill {spilling}")


if __name__ == "__main__":
    main()
