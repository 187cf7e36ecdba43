"""A VAE decode on a simulated AMD GPU with little memory. Kernels are skipped: only memory and calls are looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hip_library import hip_library
from simulation import simulate

from sd_ort.runtime.library import PROVIDER_LIBRARIES
from sd_ort.stages import optimize


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vae") / "hip"
    optimize("demo", path, target="hip", dtype="float16", components=["vae_decoder"])
    return path


def decode(folder: Path, memory: str, *arguments: str) -> tuple[subprocess.CompletedProcess[str], int]:
    """Decode an image of 512x512 on a gfx1100 with so much memory; the result, and the number of launches."""
    report = folder.parent / f"{memory}.json"
    library = hip_library().parent / PROVIDER_LIBRARIES["hip"]
    client = [sys.executable, str(Path(__file__).with_name("vae_memory_client.py")), str(library), str(folder)]
    options = ("--kernels", "skip", "--memory", memory, "--report", str(report))
    result = simulate("gfx1100", [*client, *arguments], *options)
    return result, sum(use["launches"] for use in json.loads(report.read_text())["kernels"].values())


def test_a_decode_takes_tiles_before_memory_runs_out(folder: Path) -> None:
    """With enough memory it is one call. At once, 64 MB fail; in tiles they do, and one line says so."""
    plain, launches = decode(folder, "1G")
    assert (plain.returncode, plain.stdout) == (0, "(1, 3, 512, 512) True\n"), plain.stderr[-2000:]
    assert "tiles" not in plain.stderr
    at_once, _ = decode(folder, "64M", "whole")
    assert at_once.returncode != 0
    assert "not enough GPU memory: choose a smaller size or batch" in at_once.stderr
    short, in_tiles = decode(folder, "64M")
    assert (short.returncode, short.stdout) == (0, "(1, 3, 512, 512) True\n"), short.stderr[-2000:]
    (line,) = (line for line in short.stderr.splitlines() if "tiles" in line)
    assert line.startswith("vae_decoder: 1 x 512x512 pixels at once take about 80 MB, and ")
    assert line.endswith(" MB are free: it runs in tiles of 128 pixels.")
    assert in_tiles == 36 * launches  # tiles of 128 pixels every 96
