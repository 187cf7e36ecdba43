"""scripts/amd/new_sizes.py: a call of a new size compiles nothing and searches nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hip_library import hip_library

from scripts.amd import new_sizes
from scripts.amd.simulated_runs import Table
from sd_ort.stages import optimize

KEYS = ("target", "component", "size", "case")


def test_a_new_size_of_the_demo(tmp_path: Path) -> None:
    """On a simulated GPU whose kernels are skipped. The rows are those of the written table."""
    hip_library()
    optimize("demo", tmp_path / "demo", target="hip", dtype="float16", components=new_sizes.MEASURED, hoist=False)
    table = Table(tmp_path / "sizes", "", new_sizes.COLUMNS, keys=KEYS)
    new_sizes.measure("gfx1100", tmp_path / "demo", table, 300)
    assert json.loads((tmp_path / "sizes.json").read_text())["rows"] == table.rows
    unet = [row for row in table.rows if row["component"] == "unet"]
    first, new, again = (
        next(row for row in unet if row["case"] == case) for case in ("the first call", "a new size", "again")
    )
    assert first["__hipRegisterFatBinary"] > 0  # so that zeros in the others are no accident
    assert new["launches"] > 3 * again["launches"] > 300
    assert (new["hipGraphInstantiateWithFlags"], new["hipGraphLaunch"]) == (1, 2)
    assert (again["hipGraphInstantiateWithFlags"], again["hipGraphLaunch"]) == (0, 1)
    assert new["hipblasLtMatmulAlgoGetHeuristic"] > 0 == again["hipblasLtMatmulAlgoGetHeuristic"]
    assert {row["hipEventElapsedTime"] for row in table.rows} == {0}


CALM: dict[str, Any] = {
    "case": "a new size", "__hipRegisterFatBinary": 0, "hipEventElapsedTime": 0, "processes": 0, "files": 0,
    "compilers": [],
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, None),
        ({"hipEventElapsedTime": 12}, "hipEventElapsedTime: 12"),
        ({"processes": 1, "files": 2}, "processes: 1, files: 2"),
        ({"compilers": ["/opt/rocm/lib/libamd_comgr.so.3"]}, "compilers: ['/opt/rocm/lib/libamd_comgr.so.3']"),
        ({"__hipRegisterFatBinary": 3}, "__hipRegisterFatBinary: 3"),
        ({"__hipRegisterFatBinary": 3, "case": "the first call"}, None),
    ],
)
def test_searches_and_compilations_are_found(change: dict[str, Any], problem: str | None) -> None:
    assert new_sizes.new_work(CALM | change) == problem
