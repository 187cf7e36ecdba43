"""Installation of onnxruntime-rocm, the wheel that the extra `rocm` pins, in a folder of the cache.

One environment cannot have onnxruntime and onnxruntime-rocm.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from sd_ort.core.cache import cache_folder

ROOT = Path(__file__).resolve().parents[2]


def rocm_wheel() -> Path:
    """Return the folder of the wheel, to be put before others on PYTHONPATH; pip fetches it once."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    requirement = extras["rocm"][0].partition(";")[0].strip()
    folder = cache_folder() / "rocm-wheel" / f"{requirement}-{sys.implementation.cache_tag}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            unpacked = folder.with_name(f"{folder.name}.partial")
            shutil.rmtree(unpacked, ignore_errors=True)
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
            subprocess.run([*pip, "--target", str(unpacked), requirement], check=True)
            unpacked.rename(folder)
    return folder
