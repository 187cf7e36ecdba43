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
