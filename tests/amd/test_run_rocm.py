"""scripts/amd/run_rocm.py: its ROCm installation, and the rows of cases that did not run."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from scripts.amd.run_rocm import COLUMNS, RocmRun, build, rocm_tree
from scripts.amd.simulated_runs import Run, Simulation, Table
from sd_ort.core.cache import cache_folder
from sd_ort.runtime.build import find_hip_compiler


@pytest.fixture
def gfx1100(tmp_path: Path) -> RocmRun:
    return RocmRun("gfx1100", tmp_path, Table(tmp_path / "rocm", "title", COLUMNS), 60, {})


def test_libraries_are_compiled_with_headers_of_rocm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the tree, before older ones in /usr/include."""
    libraries = build(cache_folder() / "simulated_rocm", cache_folder() / "rocm-headers/7.2.4/include")
    monkeypatch.setenv("ROCM_PATH", str(rocm_tree(tmp_path, libraries)))
    monkeypatch.delenv("HIPCXX", raising=False)
    compiler = find_hip_compiler()
    source = tmp_path / "device.hip"
    source.write_text(
        "#include <hip/hip_runtime.h>\n"
        "static_assert(HIP_VERSION_MAJOR == 7);\n"
        "__global__ void fill(float *out) { out[threadIdx.x] = expf(1); }\n"
    )
    command = [compiler.path, *compiler.flags, "--offload-arch=gfx1100", "-x", "hip", "-c", str(source)]
    subprocess.run([*command, "-o", str(tmp_path / "device.o")], check=True)


def test_cases_that_did_not_run_are_listed(gfx1100: RocmRun, tmp_path: Path) -> None:
    done = Run(["sd-ort", "doctor"], 1.0, 0, "")
    failed = Run(["sd-ort", "generate"], 1.0, 1, "error: no GPU\n")
    assert gfx1100.add("doctor", done)
    assert not gfx1100.add("generate", failed)
    assert not gfx1100.add("sizes", done, "images are missing")
    assert not gfx1100.add("no-graph", done, mean=1.2)
    gfx1100.list_cases()
    rows = {row["case"]: row for row in json.loads((tmp_path / "rocm.json").read_text())["rows"]}
    assert list(rows)[:4] == ["doctor", "generate", "sizes", "no-graph"]
    assert rows.keys() == gfx1100.cases.keys()
    assert rows["doctor"]["verdict"] == "simulated runtime: ran"
    assert rows["generate"]["verdict"] == ["exit status 1: error: no GPU"]
    assert rows["sizes"]["verdict"] == ["images are missing"]
    assert rows["no-graph"]["verdict"] == ["the image differs by 1.2 of 255 in the mean, more than 0.5"]
    assert {row["verdict"] for name, row in rows.items() if name not in list(rows)[:4]} == {"not run"}


def test_rows_of_an_earlier_run_stay(gfx1100: RocmRun, tmp_path: Path) -> None:
    """Cases that a later run does not name keep their rows."""
    gfx1100.table.add({"target": "gfx1100", "case": "doctor", "verdict": "ran"})
    later = RocmRun("gfx1100", tmp_path, Table(gfx1100.table.path, "title", COLUMNS), 60, {})
    later.list_cases()
    assert next(row for row in later.table.rows if row["case"] == "doctor")["verdict"] == "ran"


def test_processes_of_a_command_that_runs_too_long_end(tmp_path: Path) -> None:
    marker = {"MARKER_OF_A_LONG_COMMAND": str(tmp_path)}
    simulation = Simulation("gfx1100", tmp_path, ("--kernels", "skip"), marker)
    run = simulation.run("long", ["bash", "-c", "sleep 1000 & wait"], timeout=8)
    assert run.status is None

    def environment(process: Path) -> bytes:
        try:
            return (process / "environ").read_bytes()
        except OSError:
            return b""

    def running() -> list[Path]:
        return [path for path in Path("/proc").glob("[0-9]*") if str(tmp_path).encode() in environment(path)]

    deadline = time.monotonic() + 60  # a killed process is there until it is scheduled again
    while running() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert running() == []


def test_note_stands_above_the_table(tmp_path: Path) -> None:
    Table(tmp_path / "rocm", "title", COLUMNS, "No AMD GPU was used.").add({"target": "gfx1100", "case": "doctor"})
    title, _, note, *_ = (tmp_path / "rocm.md").read_text().splitlines()
    assert (title, note) == ("# title", "No AMD GPU was used.")
