"""Fixtures of the tests on the simulated ROCm."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sd_ort.core.cache import cache_folder

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def tinygrad() -> Path:
    """The checkout of tinygrad, or skip."""
    folder = os.environ.get("SD_ORT_TINYGRAD")
    if not folder:
        pytest.skip("kernels run in tinygrad's emulator: set SD_ORT_TINYGRAD to a checkout of tinygrad")
    return Path(folder)


@pytest.fixture(scope="session")
def code_object(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Compile kernels.c for a target; returns the path of the code object."""
    folder = tmp_path_factory.mktemp("kernels")

    def compile_kernels(target: str, *options: str) -> Path:
        path = folder / f"{target}.co"
        if not path.is_file():
            command = ["clang-19", "--target=amdgcn-amd-amdhsa", f"-mcpu={target}", "-nogpulib", "-O2", *options]
            source = str(Path(__file__).with_name("kernels.c"))
            subprocess.run([*command, "-x", "c", source, "-o", str(path)], check=True)
        return path

    assert shutil.which("clang-19"), "run scripts/amd/install_hip_toolchain.sh"
    return compile_kernels


@pytest.fixture(scope="session", autouse=True)
def rocm_headers() -> None:
    """ROCm's headers, with which the simulated libraries are built."""
    if (cache_folder() / "rocm-headers/7.2.4/include/hip").is_dir():
        return
    subprocess.run([sys.executable, str(ROOT / "scripts/amd/rocm_headers.py")], check=True)
