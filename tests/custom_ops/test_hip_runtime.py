"""Where the libraries for AMD find the HIP runtime, and what they say without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from compiled_files import empty_library
from hip_library import TARGETS, hip_library
from simulation import simulate

from sd_ort.runtime.library import PROVIDER_LIBRARIES

ROOT = Path(__file__).resolve().parents[2]
MISSING = "No HIP runtime (libamdhip64.so.7, .6 or .5) was found"
ADVICE = ": install ROCm 6.4 or later, or set ROCM_PATH to its folder."

# Prints the runtime that a library uses, or why there is none. Arguments: the library, a library that the process loads
# first or "", a folder with packages of pip or "".
ASK = """
import ctypes, sys
from pathlib import Path
from custom_ops.libraries import GpuLibrary

library, loaded, packages = sys.argv[1:]
sys.path[:0] = [packages] if packages else []
if loaded:
    ctypes.CDLL(loaded)
c = GpuLibrary(Path(library)).c
print((c.sd_ort_missing_runtime() or c.sd_ort_runtime_path()).decode())
assert c.sd_ort_gpu_arch() == b""  # no runtime here has a function
"""
PROVIDER = """
import sys
from sd_ort.core.errors import ProviderError
from sd_ort.runtime.providers import check_provider

try:
    check_provider(f"plugin:{sys.argv[1]}")
except ProviderError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def hidden_hip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library to preload that hides the runtimes of this machine."""
    library = tmp_path_factory.mktemp("hidden") / "hidden_hip.so"
    source = Path(__file__).with_name("hidden_hip.c")
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"], check=True)
    return library


def python(hidden_hip: Path, code: str, *arguments: Path | str, **variables: str) -> str:
    """Return what a process prints that sees no HIP runtime but those below the folder VISIBLE_HIP."""
    names = ("ROCM_PATH", "LD_LIBRARY_PATH")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {"PYTHONPATH": str(ROOT), "LD_PRELOAD": str(hidden_hip), **variables}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_card_without_kernels_is_named() -> None:
    """Before the first launch fails. gfx1151 is no target of the library."""
    library = hip_library().with_name(PROVIDER_LIBRARIES["hip"])
    done = simulate("gfx1151", [sys.executable, "-c", PROVIDER, str(library)], "--kernels", "skip", "--only-hip")
    assert done.returncode == 0, done.stderr
    targets = ", ".join(sorted(TARGETS))
    advice = "sd-ort build-ops --hip gfx1151."
    assert done.stdout.strip() == f"{library} has no kernels for gfx1151, only for {targets}: {advice}"


def test_libraries_load_without_a_runtime(hidden_hip: Path) -> None:
    assert python(hidden_hip, ASK, hip_library(), "", "") == MISSING + ADVICE


def test_the_provider_names_what_is_missing(hidden_hip: Path) -> None:
    """In one line, which is a ProviderError."""
    library = hip_library().with_name(PROVIDER_LIBRARIES["hip"])
    assert python(hidden_hip, PROVIDER, library) == MISSING + ADVICE


def test_the_order_of_runtimes(hidden_hip: Path, tmp_path: Path) -> None:
    """What the process has loaded, whatever its name, then $ROCM_PATH, then packages of pip."""
    rocm = empty_library(tmp_path / "rocm/lib/libamdhip64.so.6")
    packaged = empty_library(tmp_path / "site/_rocm_sdk_core/lib/libamdhip64.so.7", "-Wl,-soname,libamdhip64.so.7")
    torch = empty_library(tmp_path / "torch/lib/libamdhip64.so", "-Wl,-soname,libamdhip64-1234.so")
    site, variables = tmp_path / "site", {"VISIBLE_HIP": str(tmp_path)}
    assert python(hidden_hip, ASK, hip_library(), "", site, **variables) == str(packaged)
    variables["ROCM_PATH"] = str(tmp_path / "rocm")
    assert python(hidden_hip, ASK, hip_library(), "", site, **variables) == str(rocm)
    assert python(hidden_hip, ASK, hip_library(), torch, site, **variables) == str(torch)
    variables["ROCM_PATH"] = str(tmp_path / "absent")
    assert python(hidden_hip, ASK, hip_library(), "", site, **variables) == MISSING + ADVICE


def test_a_runtime_that_does_not_load_is_named(hidden_hip: Path, tmp_path: Path) -> None:
    dependency = empty_library(tmp_path / "libhsa.so.1", "-Wl,-soname,libhsa.so.1")
    empty_library(tmp_path / "rocm/lib/libamdhip64.so.7", "-Wl,--no-as-needed", str(dependency))
    variables = {"VISIBLE_HIP": str(tmp_path), "ROCM_PATH": str(tmp_path / "rocm")}
    reason = " (libhsa.so.1: cannot open shared object file: No such file or directory)"
    assert python(hidden_hip, ASK, hip_library(), "", "", **variables) == MISSING + reason + ADVICE


def test_hipblaslt_is_found_beside_the_runtime(hidden_hip: Path, tmp_path: Path) -> None:
    """Where the loader does not look: in a ROCm without ldconfig."""
    empty_library(tmp_path / "rocm/lib/libamdhip64.so.7")
    library = hip_library().with_name(PROVIDER_LIBRARIES["hip"])
    code = (
        "import ctypes, sys; ask = ctypes.CDLL(sys.argv[1]).sd_ort_missing_library;"
        "ask.restype = ctypes.c_char_p; print(ask())"
    )
    variables = {"VISIBLE_HIP": str(tmp_path), "ROCM_PATH": str(tmp_path / "rocm")}
    assert python(hidden_hip, code, library, **variables) == "b'libhipblaslt.so.1'"
    empty_library(tmp_path / "rocm/lib/libhipblaslt.so.1")
    assert python(hidden_hip, code, library, **variables) == "None"
