"""Which of several builds of the operator library is found."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from sd_ort.core.cache import cache_folder
from sd_ort.runtime.build import build
from sd_ort.runtime.library import CUDA_LIBRARY, HIP_LIBRARY, LIBRARY, SOURCES, library_path, sources_hash


def fill(folder: Path, *libraries: str, age: float, sources: str | None = None) -> Path:
    """Make `folder` a build `age` seconds old."""
    folder.mkdir(parents=True)
    for library in libraries:
        (folder / library).touch()
    (folder / "build.json").write_text(json.dumps({"sources": sources or sources_hash()}))
    os.utime(folder / "build.json", (1e9 - age, 1e9 - age))
    return folder


def test_a_build_without_gpu_kernels_hides_none_that_has_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Sessions look for GPU kernels beside the operator library: the tests' build, of the CPU's alone, hid them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    builds = cache_folder() / "ops"
    fill(builds / "of other sources", LIBRARY, CUDA_LIBRARY, age=0, sources="older")
    assert library_path() in (None, SOURCES / LIBRARY)  # a wheel's
    alone = fill(builds / "the CPU's alone", LIBRARY, age=1)
    assert library_path() == alone / LIBRARY
    older = fill(builds / "older", LIBRARY, CUDA_LIBRARY, age=3)
    assert library_path() == older / LIBRARY
    newer = fill(builds / "newer", LIBRARY, HIP_LIBRARY, age=2)
    assert library_path() == newer / LIBRARY
    assert library_path(CUDA_LIBRARY) == older / CUDA_LIBRARY
    assert library_path(HIP_LIBRARY) == newer / HIP_LIBRARY


def test_what_was_asked_for_last_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Though it was built before, and another since."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sd_ort.runtime.build._compile", lambda _, folder: fill(folder, LIBRARY, age=0))
    monkeypatch.setattr("sd_ort.runtime.build.find_headers", lambda *_, **__: tmp_path)
    first, second = build(), build(provider=True)
    assert library_path() == second
    assert build() == first == library_path()
