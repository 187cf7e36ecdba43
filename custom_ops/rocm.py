"""ROCm installations of this machine: in the order of $ROCM_PATH, /opt/rocm, and the ROCm packages of pip.

pip's packages (TheRock) unpack `_rocm_sdk_core`, `_rocm_sdk_devel` and `_rocm_sdk_libraries*` into site-packages. Their
libraries have no link without a version (libamdhip64.so), and no loader knows their folders.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from pathlib import Path
from typing import Any

_RUNTIMES = ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so")
_BLAS = ("libhipblaslt.so.1", "libhipblaslt.so.0", "libhipblaslt.so")


def roots() -> list[Path]:
    """Return the folders of ROCm installations that exist."""
    system = [Path(os.environ.get("ROCM_PATH", "/opt/rocm"))]
    return [path for path in (*system, *_pip_packages("core"), *_pip_packages("devel")) if path.is_dir()]


def library_folders() -> list[Path]:
    """Return the folders of ROCm's libraries, without duplicates."""
    folders = [root / "lib" for root in (*roots(), *_pip_packages("libraries*"))]
    return list(dict.fromkeys(folder for folder in folders if folder.is_dir()))


def libraries(pattern: str) -> list[str]:
    """Return the paths of ROCm's libraries whose file names match, by folder and name."""
    return [str(path) for folder in library_folders() for path in sorted(folder.glob(pattern))]


def load_pip_libraries(*names: str) -> None:
    """Load libraries of pip's ROCm packages by file name, so that libraries loaded later find them by that name.

    Skips names that no package has and libraries that cannot be loaded, which are left to the loader.
    """
    for name in names:
        for package in (*_pip_packages("core"), *_pip_packages("libraries*")):
            if (package / "lib" / name).is_file():
                try:
                    ctypes.CDLL(str(package / "lib" / name))
                except OSError:
                    continue
                break


def load_pip_runtime() -> None:
    """Load libamdhip64 and hipBLASLt from pip's ROCm packages.

    sd-ort's libraries use the runtime that the process has loaded. Does nothing if there is one, such as that of
    PyTorch, or $ROCM_PATH selects another one.
    """
    if "ROCM_PATH" in os.environ or loaded_library("libamdhip64") is not None:
        return
    paths = [path for package in _pip_packages("core") for path in sorted((package / "lib").glob("libamdhip64.so*"))]
    if paths:
        load_pip_libraries(paths[-1].name, "libhipblaslt.so.1")


def runtime_names() -> list[str]:
    """Return paths and file names of HIP runtimes, in the order in which the libraries of sd-ort look for one."""
    load_pip_runtime()
    loaded, root = loaded_library("libamdhip64"), os.environ.get("ROCM_PATH")
    selected = [f"{root}/lib/{name}" for name in _RUNTIMES] if root else []
    others = [folder + name for name in _RUNTIMES for folder in ("", "/opt/rocm/lib/")]
    return [*([loaded] if loaded else []), *selected, *others]


def blas_names(runtime: str) -> list[str]:
    """Return paths and file names of hipBLASLt, in the order in which the libraries of sd-ort look for it."""
    return [folder + name for folder in (f"{Path(runtime).parent}/", "") for name in _BLAS]


def path_of(function: Any) -> str:
    """Return the path by which the loader found the library of a ctypes function; links are not resolved."""
    info = _DlInfo()
    ctypes.CDLL(None).dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(info))
    return str(info.file_name.decode())


class _DlInfo(ctypes.Structure):
    """Dl_info of dladdr."""

    _fields_ = (
        ("file_name", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol_name", ctypes.c_char_p),
        ("symbol", ctypes.c_void_p),
    )


def loaded_library(name: str) -> str | None:
    """Return the path of a shared library that this process has loaded, by its name without ".so"; None without one."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    paths = (line.split(maxsplit=5)[-1] for line in maps.splitlines())
    return next((path for path in paths if Path(path).name.startswith(f"{name}.so")), None)


def llvm_tool(name: str) -> str:
    """Return the path of an LLVM tool from the folder of $HIPCXX, ROCm or PATH.

    Raises:
        FileNotFoundError: the tool is in none of these.
    """
    compiler = shutil.which(os.environ.get("HIPCXX", ""))
    folders = [Path(compiler).resolve().parent] if compiler else []
    folders += [root / layout for root in roots() for layout in ("llvm/bin", "lib/llvm/bin")]
    for candidate in (*(str(folder / name) for folder in folders), f"{name}-19", name):
        if path := shutil.which(candidate):
            return path
    raise FileNotFoundError(
        f"{name} is neither in {', '.join(map(str, folders)) or 'ROCm'} nor on PATH: install ROCm or llvm-19, "
        "or set ROCM_PATH."
    )


def _pip_packages(kind: str) -> list[Path]:
    return [path for folder in sys.path for path in sorted(Path(folder or ".").glob(f"_rocm_sdk_{kind}"))]
