"""Which of several builds of the operator library is found."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from cli_type import Cli

from sd_ort.core.cache import cache_folder
from sd_ort.core.ownership import record_file
from sd_ort.runtime import build as build_module
from sd_ort.runtime.build import build
from sd_ort.runtime.library import (
    CUDA_LIBRARY,
    HIP_LIBRARY,
    LIBRARY,
    SOURCES,
    builds,
    library_path,
    sources_hash,
    trim_builds,
)


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


def test_the_last_build_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Though it was built before, and another since."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sd_ort.runtime.build._compile", lambda _, folder: fill(folder, LIBRARY, age=0))
    monkeypatch.setattr("sd_ort.runtime.build.find_headers", lambda *_, **__: tmp_path)
    first, second = build(), build(provider=True)
    assert library_path() == second
    assert build() == first == library_path()


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A copy of the libraries' sources, to change."""
    copy = tmp_path / "sources"
    shutil.copytree(SOURCES, copy)
    monkeypatch.setattr("sd_ort.runtime.library.SOURCES", copy)
    sources_hash.cache_clear()
    yield copy
    sources_hash.cache_clear()


def test_a_gpu_build_is_of_all_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sources: Path) -> None:
    """The provider compiles bindings that the CPU's kernels use too: after a change of these it was neither built again
    nor found."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CCACHE_BASEDIR", raising=False)
    monkeypatch.setattr(build_module, "find_hip_compiler", lambda: build_module.HipCompiler("true"))
    monkeypatch.setattr(build_module, "find_headers", lambda *_, **__: tmp_path)
    compiled = []

    def run(command: Sequence[str], _: str, environment: Mapping[str, str]) -> None:
        if "--build" in command:
            assert environment["CCACHE_BASEDIR"] == command[2], "sources compiled once are misses in another folder"
            compiled.append(Path(command[2]))
            (compiled[-1] / HIP_LIBRARY).touch()

    monkeypatch.setattr(build_module, "_run", run)
    library = build(cpu=False, hip=["gfx1100"], provider=True)
    assert library_path(HIP_LIBRARY) == library == build(cpu=False, hip=["gfx1100"], provider=True)
    assert len(compiled) == 1
    with (sources / "operators/group_norm/binding.h").open("a") as file:
        file.write("// changed")
    sources_hash.cache_clear()
    assert library_path(HIP_LIBRARY) is None
    assert library != build(cpu=False, hip=["gfx1100"], provider=True) == library_path(HIP_LIBRARY)


def test_a_truncated_library_is_rebuilt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that loads one ends with SIGBUS."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled = []

    def compile_(_: object, folder: Path) -> None:
        compiled.append(folder)
        fill(folder, age=0)
        (folder / LIBRARY).write_bytes(bytes(1000))
        record = {"sources": sources_hash(), "libraries": {LIBRARY: record_file(folder / LIBRARY)}}
        (folder / "build.json").write_text(json.dumps(record))

    monkeypatch.setattr("sd_ort.runtime.build._compile", compile_)
    monkeypatch.setattr("sd_ort.runtime.build.find_headers", lambda *_, **__: tmp_path)
    library = build()
    assert build() == library == library_path()
    os.truncate(library, 999)
    assert library_path() != library
    assert build() == library == library_path()
    library.write_bytes(bytes(999) + b"x")  # of the right size
    assert build() == library
    assert library.read_bytes() == bytes(1000)
    assert len(compiled) == 3


def test_the_least_recently_used_builds_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sd_ort: Cli) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folders = [fill(cache_folder() / "ops" / str(age), LIBRARY, age=age) for age in (3, 2, 1)]
    (folders[1] / LIBRARY).write_bytes(bytes(10_000))
    assert [build.folder for build in builds()] == folders
    assert [build.folder for build in trim_builds(9000, keep=folders[0])] == [folders[1]]
    assert [build.folder for build in builds()] == [folders[0], folders[2]]
    assert "in 2 builds" in sd_ort("cache", "--list")[1]
    assert "Removed 0 entries" in sd_ort("cache", "--clear")[1]
    assert len(builds()) == 2
    assert "Removed 2 builds" in sd_ort("cache", "--clear", "--builds")[1]
    assert builds() == []
    assert sd_ort("cache", "--builds")[0] == 2
