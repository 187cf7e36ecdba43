"""kernels.json: written beside a library, published in custom_ops, and its kernels as a table."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from custom_ops.code_objects.elf import extract
from custom_ops.code_objects.entries import describe
from custom_ops.code_objects.recorded import case_entries, record

COPY = Path(__file__).resolve().parents[1] / "kernels.json"


def write(library: Path, folder: Path, build_hash: str) -> None:
    """Writes folder/code_objects/*.co and folder/kernels.json. Raises what `describe` and `record` raise.

    Only for a process that ends with it: see `record`.
    """
    objects = folder / "code_objects"
    objects.mkdir(exist_ok=True)
    for old in objects.glob("*.co"):
        old.unlink()
    kernels = describe(extract(library, objects))
    calls = record(library, {entry["symbol"]: entry["arguments"] for entry in kernels})
    for entry in kernels:
        entry["operators"] = sorted({call["operator"] for call in calls if launches(call, entry["symbol"])})
    listing = {
        "library": build_hash,
        "described_by": _described_by(),
        "folder": str(objects.resolve()),
        "kernels": kernels,
        "cases": case_entries(),
        "calls": calls,
    }
    unfinished = folder / f"kernels.{os.getpid()}.json"
    unfinished.write_text(json.dumps(listing, indent=1) + "\n")
    unfinished.replace(folder / "kernels.json")


def launches(call: dict, symbol: str) -> bool:
    """Whether a call launches the kernel."""
    return any(launch["symbol"] == symbol for launch in call["launches"])


def publish(folder: Path) -> None:
    """Copies folder/kernels.json to custom_ops/kernels.json, where that can be written (not in an installed wheel).

    Writes it anew before when the Python files that describe the kernels have changed since.
    """
    listing = json.loads((folder / "kernels.json").read_text())
    if listing.get("described_by") != _described_by():
        command = [sys.executable, "-m", "custom_ops.code_objects", str(folder / "libsd_ort_hip.so"), str(folder)]
        environment = os.environ | {"PYTHONPATH": str(COPY.parent.parent)}
        subprocess.run([*command, listing["library"]], check=True, env=environment)
    if os.access(COPY.parent, os.W_OK):
        shutil.copyfile(folder / "kernels.json", COPY)


def _described_by() -> str:
    """Hash of the Python files that kernels.json is made of, beside the library."""
    files = [COPY.parent / "operators.txt", COPY.parent / "op.py", *Path(__file__).parent.glob("*.py")]
    files += [path for name in ("cases.py", "launches.py") for path in COPY.parent.glob(f"*/{name}")]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def table(entries: list[dict]) -> str:
    """Markdown: registers, LDS, spills and occupancy; a row per kernel instance, a column per architecture."""
    archs = sorted({entry["arch"] for entry in entries})
    rows: dict[str, dict[str, str]] = {}
    for e in entries:
        spills = e["vgpr_spills"] + e["sgpr_spills"]
        cell = f"{e['vgprs']} / {e['sgprs']} / {e['lds_bytes']['static']} / {spills} / {e['occupancy']}"
        template = ", ".join(json.dumps(value).strip('"') for value in e["template"].values())
        rows.setdefault(f"{e['kernel']}<{template}>", {})[e["arch"]] = cell
    lines = [
        "# Kernels of the AMD code objects",
        "",
        "A cell: VGPRs (CDNA: with AGPRs) / SGPRs / static LDS bytes / registers spilled, of both kinds / waves a SIMD",
        "(of 8 on CDNA, 16 on RDNA).",
        "",
        f"| kernel | {' | '.join(archs)} |",
        "|---|" + "---|" * len(archs),
    ]
    lines += [
        f"| {kernel} | {' | '.join(cells.get(arch, '-') for arch in archs)} |" for kernel, cells in sorted(rows.items())
    ]
    return "\n".join(lines) + "\n"
