"""Headers of CUDA, cuBLASLt, cuDNN and NVML from PyPI's wheels, kept in ~/.cache/sd-ort/nvidia-headers/VERSION/include.

The wheels have 1.2 GB for each version of CUDA, nearly all of it libraries: they are downloaded once, and only their
headers are kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from sd_ort.core.cache import cache_folder

WHEELS = {
    "12": (  # with the older cuDNN that common/cudnn.h loads
        "nvidia-cublas-cu12==12.9.3.13",
        "nvidia-cuda-cccl-cu12==12.9.27",
        "nvidia-cuda-nvcc-cu12==12.9.86",
        "nvidia-cuda-runtime-cu12==12.9.79",
        "nvidia-cudnn-cu12==8.9.7.29",
        "nvidia-nvml-dev-cu12==12.9.79",
    ),
    "13": (
        "nvidia-cublas==13.10.0.20",
        "nvidia-cuda-cccl==13.3.5.0.6",
        "nvidia-cuda-crt==13.5.37",
        "nvidia-cuda-runtime==13.5.37",
        "nvidia-cudnn-cu13==9.28.1.4",
        "nvidia-nvml-dev==13.5.37",
    ),
}


def nvidia_headers(version: str) -> Path:
    """Return the include folder for a version of CUDA ("12" or "13"); download it the first time."""
    wheels = WHEELS[version]
    key = hashlib.sha256(" ".join(wheels).encode()).hexdigest()[:8]
    folder = cache_folder() / "nvidia-headers" / f"{version}-{key}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".work-") as work_:
            work = Path(work_)
            for wheel in wheels:
                _add_headers(wheel, work)
            with contextlib.suppress(OSError):  # another process made the same
                (work / "new").rename(folder)
    return folder / "include"


def _add_headers(wheel: str, work: Path) -> None:
    """Add the files below any folder `include` of a wheel to work/new/include."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    subprocess.run([*pip, "--dest", str(work), wheel], check=True)
    [path] = work.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            parts = Path(name).parts
            if "include" in parts[:-1]:
                to = work / "new" / Path(*parts[parts.index("include") :])
                to.parent.mkdir(parents=True, exist_ok=True)
                to.write_bytes(archive.read(name))
    path.unlink()
