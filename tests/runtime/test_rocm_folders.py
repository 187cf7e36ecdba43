"""ROCm's compiler, tools and libraries in the places where its packages put them, and the targets that are built."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from compiled_files import empty_library

from custom_ops import rocm
from custom_ops.amd_targets import TARGETS, simd
from sd_ort.runtime import build, providers
from sd_ort.runtime.library import BuildError

CLANG = shutil.which("clang++-19") or ""  # before tests change PATH


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, and no ROCm, no compiler and no tool anywhere."""
    for name in ("HIPCXX", "HIPCXXFLAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "absent"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def program(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("layout", ["llvm/bin", "lib/llvm/bin"])
def test_rocm_path_has_compiler_and_tools(layout: str, nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = nowhere / "rocm-7"
    (root / "lib").mkdir(parents=True)
    clang, tool = program(root / layout / "clang++"), program(root / layout / "llvm-readelf")
    monkeypatch.setenv("ROCM_PATH", str(root))
    compiler = build.find_hip_compiler()
    assert (compiler.path, compiler.flags) == (str(clang), (f"--rocm-path={root}", "-isystem", f"{root}/include"))
    assert rocm.llvm_tool("llvm-readelf") == str(tool)


def test_headers_of_the_distribution_stay_in_their_place(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As -isystem, /usr/include would come before the headers of C++, which look for it behind them."""
    root = nowhere / "rocm-7"
    program(root / "llvm/bin/clang++")
    (root / "include").symlink_to("/usr/include")
    monkeypatch.setenv("ROCM_PATH", str(root))
    assert build.find_hip_compiler().flags == (f"--rocm-path={root}",)


def test_packages_of_pip_have_compiler_tools_and_libraries(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TheRock's layout; the folder of hipBLASLt is another one."""
    site = nowhere / "site-packages"
    core, libraries = site / "_rocm_sdk_core", site / "_rocm_sdk_libraries_gfx110X_all"
    clang = program(core / "lib/llvm/bin/clang++")
    tool = program(core / "lib/llvm/bin/llvm-cxxfilt")
    (libraries / "lib").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    compiler = build.find_hip_compiler()
    assert (compiler.path, compiler.flags) == (str(clang), (f"--rocm-path={core}", "-isystem", f"{core}/include"))
    assert rocm.library_folders() == [core / "lib", libraries / "lib"]
    assert rocm.llvm_tool("llvm-cxxfilt") == str(tool)


def test_tools_lie_next_to_the_selected_compiler(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clang, tool = program(nowhere / "llvm/clang++-22"), program(nowhere / "llvm/llvm-readelf")
    program(nowhere / "bin/clang++").unlink()
    (nowhere / "bin/clang++").symlink_to(clang)
    monkeypatch.setenv("HIPCXX", "clang++")
    assert rocm.llvm_tool("llvm-readelf") == str(tool)


def test_missing_tool_is_named(nowhere: Path) -> None:
    with pytest.raises(FileNotFoundError, match="llvm-readelf is neither in ROCm nor on PATH: install ROCm"):
        rocm.llvm_tool("llvm-readelf")


def test_cmake_of_pip_is_found(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the Python that runs, whose environment need not be activated."""
    cmake = program(nowhere / "venv/bin/cmake")
    monkeypatch.setattr(sys, "executable", str(nowhere / "venv/bin/python"))
    assert build.find_program("cmake", "") == str(cmake)


def test_libraries_of_pip_are_loaded_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that needs libamdhip64 loads after those of pip's packages, which no loader finds, and so does
    hipBLASLt by its name."""
    core = empty_library(tmp_path / "_rocm_sdk_core/lib/libamdhip64.so.97", "-Wl,-soname,libamdhip64.so.97")
    empty_library(tmp_path / "_rocm_sdk_libraries_x/lib/libhipblaslt.so.1", "-Wl,-soname,libhipblaslt.so.1")
    ours = empty_library(tmp_path / "ours.so", "-Wl,--no-as-needed", str(core))
    script = (
        "import ctypes, sys; from pathlib import Path; from sd_ort.runtime import providers\n"
        "sys.path.insert(0, sys.argv[1]) if sys.argv[2] == 'packages' else None\n"
        "print(providers.unloadable_libraries(Path(sys.argv[1], 'ours.so')))\n"
        "if sys.argv[2] == 'packages': ctypes.CDLL(sys.argv[1] + '/ours.so'), ctypes.CDLL('libhipblaslt.so.1')\n"
    )
    assert ours.is_file()
    for packages, missing in (("none", "['libamdhip64.so.97']"), ("packages", "[]")):
        command = [sys.executable, "-c", script, str(tmp_path), packages]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == missing


def test_folders_of_rocm_are_named(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert providers.library_path_advice(["libcudart.so.13"]) == "add its folder to LD_LIBRARY_PATH"
    assert providers.library_path_advice(["libamdhip64.so.7"]).endswith(
        "(folders of ROCm's libraries here: none; set ROCM_PATH)"
    )
    (nowhere / "absent/lib").mkdir(parents=True)
    assert f"here: {nowhere}/absent/lib)" in providers.library_path_advice(["libhipblaslt.so.1"])


@pytest.mark.parametrize("target", ["gfx1010", "gfx906", "gfx9-generic", "gfx1250", "gfx"])
def test_unsupported_targets_are_refused(target: str) -> None:
    """In one line, which lists those that are supported."""
    with pytest.raises(
        BuildError, match=f"^{target} is not a supported AMD target: choose from gfx908, gfx90a, "
    ) as refusal:
        build.build(cpu=False, hip=["gfx1100", target])
    assert "\n" not in str(refusal.value)


def test_registers_of_targets() -> None:
    """As LLVM counts them, with features in the name or not."""
    assert simd("gfx90a:sramecc+:xnack-").registers == 512
    assert {simd(target).waves for target in TARGETS if target.startswith("gfx9")} == {8, 10}
    assert simd("gfx1030") == simd("gfx10-3-generic") == simd("gfx1150")
    assert [simd(target).granularity for target in ("gfx1151", "gfx1150", "gfx11-generic", "gfx12-generic")] == [
        24,
        16,
        16,
        24,
    ]


def test_a_target_unknown_to_the_compiler_is_named(nowhere: Path) -> None:
    clang = program(nowhere / "bin/clang", '#!/bin/sh\ncase "$*" in *gfx950*) exit 1 ;; esac\n')
    compiler = build.HipCompiler(str(clang))
    build.check_compiler(compiler, ["gfx942", "gfx11-generic"])
    with pytest.raises(BuildError, match="does not know gfx950: install a newer ROCm, or set HIPCXX to a newer clang"):
        build.check_compiler(compiler, ["gfx942", "gfx950"])


def test_device_libraries_older_than_the_compiler_are_named(nowhere: Path) -> None:
    """clang 22 knows gfx950, and ROCm 6.0 beside it has no library for it, which clang says when it links."""
    refusal = "clang++: error: cannot find ROCm device library for gfx950; provide its path via '--rocm-path' or ..."
    clang = program(
        nowhere / "bin/clang",
        f"""#!/bin/sh\ncase "$*" in *-nogpulib*) ;; *gfx950*) echo "{refusal}" >&2; exit 1 ;; esac\n""",
    )
    compiler = build.HipCompiler(str(clang), ("--rocm-path=/opt/rocm-6.0",))
    build.check_compiler(compiler, ["gfx942"])
    expected = (
        "no ROCm device library for gfx950, so it cannot build for gfx950: install a newer ROCm, or set HIPCXXFLAGS="
    )
    with pytest.raises(BuildError, match=expected) as error:
        build.check_compiler(compiler, ["gfx942", "gfx950"])
    assert "\n" not in str(error.value)


@pytest.mark.skipif(not CLANG, reason="clang 19 is not installed")
def test_clang_without_device_libraries_is_refused(nowhere: Path) -> None:
    """The error is clang's own: it looks for device libraries even if it only preprocesses."""
    compiler = build.HipCompiler(CLANG, (f"--rocm-path={nowhere}",))
    with pytest.raises(BuildError, match="finds no ROCm device library, so it cannot build for gfx942: install"):
        build.check_compiler(compiler, ["gfx942"])
