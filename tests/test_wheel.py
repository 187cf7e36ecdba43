"""The wheel: it carries the compiled library, draws where there is no compiler, and is made without one too."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from compiled_files import installed_wheel

from scripts.amd import wheel_size
from scripts.checks import windows_sources, windows_wheel
from sd_ort.demo import FOLDERS
from sd_ort.stages import optimize

ROOT = Path(__file__).parent.parent
PIP_WHEEL = ["-m", "pip", "wheel", "-v", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]


def programs(folder: Path, *names: str) -> str:
    """A PATH of nothing but these programs."""
    folder.mkdir()
    for name in names:
        if path := shutil.which(name):
            (folder / name).symlink_to(path)
    return str(folder)


def run(*command: object, **environment: str) -> str:
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "CXX", "CC")}
    result = subprocess.run(
        [*map(str, command)], env=inherited | environment, cwd=environment["TMPDIR"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout + result.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("wheel")
    run(sys.executable, *PIP_WHEEL, "--wheel-dir", work / "made", ROOT, TMPDIR=str(work))
    return next((work / "made").iterdir())


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Path:
    """The folder of programs of an environment with the wheel."""
    return installed_wheel(wheel, tmp_path, partial(run, TMPDIR=str(tmp_path)))


def test_the_wheel_has_both_demo_models(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in FOLDERS.values():
        files = {str(path.relative_to(ROOT)) for path in folder.rglob("*") if path.is_file()}
        assert len(files) > 8
        assert files <= names
    assert wheel.stat().st_size <= 60e6  # PyPI takes 100 MB


def test_the_library_needs_no_newer_glibc_than_2_28(wheel: Path, tmp_path: Path) -> None:
    library = Path(zipfile.ZipFile(wheel).extract("custom_ops/libsd_ort_ops.so", tmp_path))
    assert wheel_size.needed_glibc(library) <= wheel_size.GLIBC
    (tmp_path / "newer.so").write_bytes(b"\0dlopen\0GLIBC_2.2.5\0GLIBC_2.34\0")
    assert wheel_size.needed_glibc(tmp_path / "newer.so") == (2, 34)


def test_the_wheel_generates_with_its_own_library(installed: Path, small_export: Path, tmp_path: Path) -> None:
    assert list((installed.parent / "lib").glob("python*/site-packages/custom_ops/libsd_ort_ops.so"))
    optimize(small_export, tmp_path / "fused", components=["text_encoder", "unet", "vae_decoder"])
    bare = {"PATH": programs(tmp_path / "empty"), "TMPDIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    bare |= {"OMP_NUM_THREADS": "1"}
    findings = json.loads(run(installed / "sd-ort", "doctor", "--json", **bare))
    assert Path(findings["op_library"]).is_relative_to(installed.parent)
    size = ["--height", 64, "--width", 64, "--steps", 1]
    out = tmp_path / "a.png"
    output = run(installed / "sd-ort", "generate", "a cat", "--model", tmp_path / "fused", *size, "--out", out, **bare)
    assert "no op library" not in output
    assert out.is_file()


def test_a_machine_without_a_compiler_gets_a_wheel_and_one_line(tmp_path: Path) -> None:
    tools = programs(tmp_path / "bin", "cmake", "ninja", "make")
    output = run(sys.executable, *PIP_WHEEL, "--wheel-dir", tmp_path / "made", ROOT, PATH=tools, TMPDIR=str(tmp_path))
    (wheel,) = (tmp_path / "made").iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    assert "without its operator library" in output
    assert "run `sd-ort build-ops`" in output


def test_a_wheel_for_windows_has_its_libraries_and_tag(tmp_path: Path) -> None:
    """It is built from a wheel without compiled code; pip rejects files that differ from RECORD."""
    portable, record = tmp_path / "sd_ort-1.0.0-py3-none-any.whl", "sd_ort-1.0.0.dist-info/RECORD"
    with zipfile.ZipFile(portable, "w") as archive:
        archive.writestr("custom_ops/rocm.py", "import os\n")
        archive.writestr("sd_ort-1.0.0.dist-info/WHEEL", "Root-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(record, "custom_ops/rocm.py,sha256=old,1\n")
    libraries = [tmp_path / name for name in (windows_wheel.LIBRARY, windows_wheel.HIP_LIBRARY)]
    contents = [b"MZ", b"MZ hipv4-amdgcn-amd-amdhsa--gfx1200 "]
    for library, content in zip(libraries, contents, strict=True):
        library.write_bytes(content)
    wheel = windows_wheel.add_libraries(portable, libraries, tmp_path / "out")
    assert wheel.name == "sd_ort-1.0.0-py3-none-win_amd64.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = [f"custom_ops/{library.name}" for library in libraries]
        assert [archive.read(name) for name in names] == contents
        metadata = archive.read("sd_ort-1.0.0.dist-info/WHEEL").decode()
        assert metadata == "Root-Is-Purelib: false\nTag: py3-none-win_amd64\n"
        rows = dict(line.split(",", 1) for line in archive.read(record).decode().splitlines())
        assert rows.keys() == set(archive.namelist())
        digest = base64.urlsafe_b64encode(hashlib.sha256(b"MZ").digest()).decode().rstrip("=")
        assert rows[names[0]] == f"sha256={digest},2"
    assert wheel_size.main([wheel], tmp_path / "wheel.md") == 0
    assert "| libsd_ort_ep_hip.dll | gfx1200 | 0.0 | 0.0 | none |" in (tmp_path / "wheel.md").read_text()


def test_the_headers_of_a_zig_below_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """zig names them relative to it, and CMake compiles elsewhere."""
    zig = tmp_path / "zig"
    zig.write_text('#!/bin/sh\necho " zig clang -cc1 -isystem lib/include -D WINDOWS=1 -isystem /usr/include" >&2\n')
    zig.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    command = windows_sources.hip_host_compiler([str(zig), "c++"], Path("/rocm/include"))
    headers = [str(tmp_path / "lib/include"), "/usr/include", "/rocm/include"]
    assert [word for option, word in pairwise(command) if option == "-isystem"] == headers
    assert "WINDOWS=1" in command
