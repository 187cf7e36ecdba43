#!/usr/bin/env python3
"""Write the sizes of the compiled libraries in wheels to results/amd/wheel.md. Usage: wheel_size.py WHEEL...

Sections of other wheels that the page has stay, with the commit that they are of.
Exits with 1 if those of a wheel have more than LIMIT_MB in it, which is compressed, or need a glibc newer than GLIBC.
"""

from __future__ import annotations

import re
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from custom_ops.amd_targets import kernel_targets
from sd_ort.runtime import machine

ROOT = Path(__file__).resolve().parents[2]
LIMIT_MB = 12
GLIBC = (2, 28)  # of RHEL 8 and Debian 10: tag manylinux_2_28
DEMO = "sd_ort/demo/"


def needed_glibc(library: Path) -> tuple[int, ...]:
    """Return the newest version of glibc's symbols that a library names in its table of strings, or () if none."""
    names = re.findall(rb"\0GLIBC_(\d+)\.(\d+)", library.read_bytes())
    return max(((int(major), int(minor)) for major, minor in names), default=())


def table(wheel: Path) -> tuple[list[str], bool]:
    """Return the lines of a wheel's section, and whether its libraries are within LIMIT_MB and GLIBC."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        entries = archive.infolist()
        libraries = [entry for entry in entries if entry.filename.endswith((".so", ".dll"))]
        paths = {entry.filename: Path(archive.extract(entry, folder)) for entry in libraries}
        targets = {name: kernel_targets(path) for name, path in paths.items()}
        glibc = {name: needed_glibc(path) for name, path in paths.items() if name.endswith(".so")}
    total = sum(entry.compress_size for entry in libraries)
    demo = sum(entry.compress_size for entry in entries if entry.filename.startswith(DEMO))
    lines = [
        f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, of which the demo's models have {demo / 1e6:.1f} MB and",
        f"the libraries {total / 1e6:.1f} MB (limit: {LIMIT_MB} MB). Commit {machine.commit()}.",
        "",
        "| library | kernels for | MB | MB in the wheel | glibc |",
        "|---|---|---|---|---|",
        *(
            f"| {Path(entry.filename).name} | {', '.join(targets[entry.filename]) or 'none'} "
            f"| {entry.file_size / 1e6:.1f} | {entry.compress_size / 1e6:.1f} "
            f"| {'.'.join(map(str, glibc.get(entry.filename, ()))) or 'none'} |"
            for entry in libraries
        ),
    ]
    return lines, total <= LIMIT_MB * 1e6 and max(glibc.values(), default=()) <= GLIBC


def main(wheels: Sequence[Path], out: Path = ROOT / "results/amd/wheel.md") -> int:
    """Write the sections of all wheels and return the exit status."""
    tables = {wheel.name: table(wheel) for wheel in wheels}
    texts = re.split(r"\n\n(?=\S+\.whl: )", out.read_text().rstrip())[1:] if out.is_file() else []
    sections = {text.split(": ")[0]: text for text in texts}
    sections |= {name: "\n".join(lines) for name, (lines, _) in tables.items()}
    head = ["# The wheels with prebuilt kernels for AMD", "", "Made by `scripts/build_wheels --hip`, for Windows with"]
    lines = [*head, "`--windows` after it."]
    for _, section in sorted(sections.items()):
        lines += ["", section]
    out.write_text("\n".join(lines) + "\n")
    print(out.read_text())
    return int(not all(is_small for _, is_small in tables.values()))


if __name__ == "__main__":
    sys.exit(main([Path(wheel) for wheel in sys.argv[1:]]))
