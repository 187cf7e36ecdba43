#!/usr/bin/env python3
"""Write the sizes of the compiled libraries in a wheel to results/amd/wheel.md. Usage: wheel_size.py WHEEL

Exits with 1 if they have more than LIMIT_MB in the wheel, which is compressed: libraries of prebuilt kernels grow.
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from pathlib import Path

from custom_ops.amd_targets import kernel_targets

ROOT = Path(__file__).resolve().parents[2]
LIMIT_MB = 12
DEMO = "sd_ort/demo/"


def main(wheel: Path, out: Path = ROOT / "results/amd/wheel.md") -> int:
    """Write the table and return the exit status."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        entries = archive.infolist()
        libraries = [entry for entry in entries if entry.filename.endswith(".so")]
        targets = {entry.filename: kernel_targets(Path(archive.extract(entry, folder))) for entry in libraries}
    total = sum(entry.compress_size for entry in libraries)
    demo = sum(entry.compress_size for entry in entries if entry.filename.startswith(DEMO))
    lines = [
        "# The wheel with prebuilt kernels for AMD",
        "",
        f"Made by `scripts/build_wheels --hip`: {wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB, of which the demo's",
        f"models have {demo / 1e6:.1f} MB and the libraries {total / 1e6:.1f} MB (limit: {LIMIT_MB} MB).",
        "",
        "| library | targets | MB | MB in the wheel |",
        "|---|---|---|---|",
        *(
            f"| {Path(entry.filename).name} | {', '.join(targets[entry.filename]) or 'CPU'} "
            f"| {entry.file_size / 1e6:.1f} | {entry.compress_size / 1e6:.1f} |"
            for entry in libraries
        ),
    ]
    out.write_text("\n".join(lines) + "\n")
    print(out.read_text())
    return int(total > LIMIT_MB * 1e6)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
