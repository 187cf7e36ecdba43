"""scripts/amd/simulated_runs.py: the kernels that a row names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.amd.simulated_runs import compiled_by
from sd_ort.runtime.library import PROVIDER_LIBRARIES, sources_hash


def test_a_row_names_the_compiler_and_the_targets_of_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "sd-ort/ops/0123"
    folder.mkdir(parents=True)
    (folder / PROVIDER_LIBRARIES["hip"]).touch()
    compilers = ["/usr/bin/g++: g++ 12.2.0", "/usr/bin/clang++-19: Debian clang version 19.1.7"]
    record = {"sources": sources_hash(), "compilers": compilers, "hip": ["gfx942", "gfx1100"]}
    (folder / "build.json").write_text(json.dumps(record))
    assert compiled_by(PROVIDER_LIBRARIES["hip"]) == "clang 19 for gfx942, gfx1100"


def test_a_row_names_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sd_ort.runtime.library.SOURCES", tmp_path)
    monkeypatch.setattr("scripts.amd.simulated_runs.SOURCES", tmp_path)
    (tmp_path / PROVIDER_LIBRARIES["hip"]).touch()
    monkeypatch.setattr("sd_ort.runtime.library.sources_hash", lambda: "")
    assert compiled_by(PROVIDER_LIBRARIES["hip"]) == "the wheel"
