"""What a measurement needs besides the clock: the machine, the versions, memory peaks, PSNR, and safe files."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import psutil

from sd_ort.errors import OutputError

PACKAGES = ("sd-ort", "torch", "diffusers", "transformers", "onnx", "onnx-ir", "onnxscript", "numpy")
MEGABYTE = 2**20
EQUAL_DB = 120.0  # above what one grey level in one pixel of a 1024 x 1024 picture gives (113 dB); JSON has no infinity


def machine() -> dict[str, Any]:
    """Processor, cores this process may use, memory, GPUs and system, for the head of a results file."""
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_GB": round(psutil.virtual_memory().total / 1e9, 1),
        "gpus": gpus(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def cpu_name() -> str:
    """The processor's marketing name, or its architecture where the system does not tell."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def gpus() -> list[str]:
    """Name and driver of each GPU that nvidia-smi or amd-smi/rocm-smi reports; [] without such a tool."""
    queries = (
        ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
        ("rocm-smi", "--showproductname", "--showdriverversion", "--csv"),
    )
    for query in queries:
        if shutil.which(query[0]):
            result = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
            if result.returncode == 0:
                return [line.strip() for line in result.stdout.splitlines() if line.strip()]
    return []


def versions() -> dict[str, str]:
    """Version of Python and of each package a result depends on; the onnxruntime wheel under its own name."""
    from sd_ort.session import installed_wheels

    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found | installed_wheels()


def commit() -> str | None:
    """Short hash of the commit this package runs from, with "+" when tracked files were changed; None outside git."""

    def git(*arguments: str) -> str | None:
        root = Path(__file__).resolve().parent
        try:
            result = subprocess.run(("git", *arguments), cwd=root, capture_output=True, text=True, check=False)
        except OSError:
            return None
        return result.stdout.strip() if result.returncode == 0 else None

    hash_ = git("rev-parse", "--short", "HEAD")
    if hash_ is None:
        return None
    return hash_ + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median, mean, extremes and the values themselves, in the unit they came in."""
    return {
        "median": median(values),
        "mean": mean(values),
        "min": min(values),
        "max": max(values),
        "values": list(values),
    }


def reset_peak_memory() -> bool:
    """Let `peak_memory_MB` count from now. False where the system cannot: then it counts from the process's start."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_memory_MB() -> float:
    """Highest resident memory of this process since its start or `reset_peak_memory`, in MiB.

    Resident means what is in RAM: the heap, and those pages of mapped model files that were touched.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return float(psutil.Process().memory_info().rss) / MEGABYTE


def psnr(image: np.ndarray, reference: np.ndarray) -> float:
    """Peak signal-to-noise ratio in dB of two uint8 images of one shape; `EQUAL_DB`, not infinity, when they are equal.

    Raises ValueError for images of different shapes.
    """
    if image.shape != reference.shape:
        raise ValueError(f"images of shapes {image.shape} and {reference.shape} cannot be compared")
    error = np.mean((image.astype(np.float64) - reference.astype(np.float64)) ** 2)
    return EQUAL_DB if error == 0 else float(10 * np.log10(255.0**2 / error))


def write_text(path: Path, text: str) -> None:
    """Replace a file as a whole: an interrupt leaves the old one or the new one. Raises OutputError when it cannot."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes, *, overwrite: bool = True) -> None:
    """Write a file that appears only when all of it is there; with `overwrite=False` never in another one's place.

    Raises OutputError when the file exists (and may not be replaced), or when it cannot be written.
    """
    if path.exists() and not overwrite:
        raise OutputError(f"{path} exists: choose another name or pass --overwrite.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        temporary = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            temporary.chmod(0o644)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}.") from error


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file as a whole."""
    write_text(path, json.dumps(value, indent=1) + "\n")
