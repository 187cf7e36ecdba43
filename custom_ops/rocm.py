"""Find ROCm installations: first $ROCM_PATH, then /opt/rocm, then ROCm packages of pip.

On Windows the variable is %HIP_PATH% and the libraries are in `bin`; drivers have a HIP runtime in the system's folder.
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

# As in common/platform.h: file names by version, the variable with ROCm's folder, and the libraries' folder in it.
if sys.platform == "win32":
    _RUNTIMES = ("amdhip64_7.dll", "amdhip64_6.dll", "amdhip64.dll")
    _BLAS = ("libhipblaslt.dll", "hipblaslt.dll")
    _VARIABLE, _LIBRARIES = "HIP_PATH", "bin"
    _USUAL_ROOT: str | None = None
else:
    _RUNTIMES = ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so")
    _BLAS = ("libhipblaslt.so.1", "libhipblaslt.so.0", "libhipblaslt.so")
    _VARIABLE, _LIBRARIES = "ROCM_PATH", "lib"
    _USUAL_ROOT = "/opt/rocm"


def roots() -> list[Path]:
    """Return the folders of ROCm installations that exist."""
    root = os.environ.get(_VARIABLE, _USUAL_ROOT)
    system = [Path(root)] if root else []
    return [path for path in (*system, *_pip_packages("core"), *_pip_packages("devel")) if path.is_dir()]


def library_folders() -> list[Path]:
    """Return the folders of ROCm's libraries, without duplicates."""
    folders = [root / _LIBRARIES for root in (*roots(), *_pip_packages("libraries*"))]
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
            if (package / _LIBRARIES / name).is_file():
                try:
                    ctypes.CDLL(str(package / _LIBRARIES / name))
                except OSError:
                    continue
                break


def load_pip_runtime() -> None:
    """Load HIP's runtime and hipBLASLt from pip's ROCm packages.

    sd-ort's libraries use the runtime that the process has loaded. Does nothing if there is one, such as that of
    PyTorch, or $ROCM_PATH selects another one.
    """
    if _VARIABLE in os.environ or loaded_runtime() is not None:
        return
    folders = [package / _LIBRARIES for package in _pip_packages("core")]
    if name := next((name for name in _RUNTIMES if any((folder / name).is_file() for folder in folders)), None):
        load_pip_libraries(name, _BLAS[0])


def runtime_names() -> list[str]:
    """Return paths and file names of HIP runtimes, in the order in which the libraries of sd-ort look for one."""
    load_pip_runtime()
    loaded, root = loaded_runtime(), os.environ.get(_VARIABLE)
    selected = [f"{root}/{_LIBRARIES}/{name}" for name in _RUNTIMES] if root else []
    folders = ("", f"{_USUAL_ROOT}/{_LIBRARIES}/") if _USUAL_ROOT else ("",)
    others = [folder + name for name in _RUNTIMES for folder in folders]
    return [*([loaded] if loaded else []), *selected, *others]


def blas_names(runtime: str) -> list[str]:
    """Return paths and file names of hipBLASLt, in the order in which the libraries of sd-ort look for it."""
    return [folder + name for folder in (f"{Path(runtime).parent}/", "") for name in _BLAS]


def path_of(function: Any) -> str:
    """Return the path by which the loader found the library of a ctypes function; links are not resolved."""
    if sys.platform == "win32":
        by_address, library = 0x4, ctypes.c_void_p()
        ctypes.windll.kernel32.GetModuleHandleExW(
            by_address, ctypes.cast(function, ctypes.c_void_p), ctypes.byref(library)
        )
        return _path_of_module(library)
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


def loaded_runtime() -> str | None:
    """Return the path of the HIP runtime that this process has loaded; None without one."""
    if sys.platform == "win32":
        find = ctypes.windll.kernel32.GetModuleHandleW
        find.restype = ctypes.c_void_p
        module = next((handle for name in _RUNTIMES if (handle := find(name))), None)
        return module and _path_of_module(ctypes.c_void_p(module))
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    paths = (line.split(maxsplit=5)[-1] for line in maps.splitlines())
    return next((path for path in paths if Path(path).name.startswith("libamdhip64.so")), None)


def _path_of_module(module: ctypes.c_void_p) -> str:
    """Return the path of a library that Windows has loaded."""
    text = ctypes.create_unicode_buffer(1 << 15)
    ctypes.windll.kernel32.GetModuleFileNameW(module, text, len(text))  # type: ignore[attr-defined]
    return text.value


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
