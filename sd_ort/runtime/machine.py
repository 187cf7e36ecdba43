"""Metadata of a measurement: hardware, package versions, git commit and peak memory."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = ("sd-ort", "torch", "diffusers", "transformers", "onnx", "onnx-ir", "onnxscript", "numpy", "openvino")
MEGABYTE = 2**20


def machine() -> dict[str, Any]:
    """Processor, cores this process may use, memory, GPUs and system, for the head of a results file."""
    import psutil

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


def multiplies_bfloat16() -> bool:
    """Whether the processor has matrix units for bfloat16 (AMX), as far as the system tells."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.is_file() and "amx_bf16" in cpuinfo.read_text().split()


def gpus() -> list[str]:
    """Name and driver of each GPU that nvidia-smi, amd-smi or rocm-smi reports; [] without such a tool."""
    queries = (
        ("nvidia-smi --query-gpu=name,driver_version --format=csv,noheader", str.splitlines),
        ("amd-smi static --asic --driver --json", amd_smi_gpus),
        ("rocm-smi --showproductname --showdriverversion --csv", rocm_smi_gpus),  # ROCm 6 and before
    )
    for query, parse in queries:
        with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
            result = subprocess.run(query.split(), capture_output=True, text=True, timeout=30, check=True)
            if names := [name.strip() for name in parse(result.stdout) if name.strip()]:
                return names
    return []


def amd_smi_gpus(output: str) -> list[str]:
    """Return name and driver of the GPUs in what `amd-smi static --json` prints. Raises ValueError for other text."""
    report = json.loads(output)
    entries = report.get("gpu_data", []) if isinstance(report, dict) else report  # a list before ROCm 7
    pairs = [(entry.get("asic", {}).get("market_name"), entry.get("driver", {}).get("version")) for entry in entries]
    return [", ".join(filter(None, names)) for names in pairs]


def rocm_smi_gpus(output: str) -> list[str]:
    """Return name and driver of the GPUs in what `rocm-smi --csv` prints: tables with a heading each.

    A row is of a device (card0) or of the system, whose driver is that of all devices.
    """
    import csv

    rows: dict[str, dict[str, str]] = {}
    heading: list[str] = []
    for cells in csv.reader(output.splitlines()):
        if cells[:1] == ["device"]:
            heading = [name.lower() for name in cells]
        elif cells and heading:
            rows.setdefault(cells[0], {}).update(zip(heading, cells, strict=False))
    driver = rows.pop("cardsystem", rows.pop("system", {})).get("driver version", "")
    names = [row.get("card series") or row.get("device name") or row.get("card model") for row in rows.values()]
    return [", ".join(filter(None, (name, driver))) for name in names if name]


def versions() -> dict[str, str]:
    """Version of Python and of each package a result depends on; the onnxruntime wheel under its own name."""
    from importlib import metadata

    from sd_ort.runtime.ort_wheel import installed_wheels

    version_of = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            version_of[package] = metadata.version(package)
    return version_of | installed_wheels()


def commit() -> str | None:
    """Return the short hash of the package's commit, with "+" if tracked files were changed; None outside git.

    $SD_ORT_COMMIT takes precedence, for machines without git.
    """
    if named := os.environ.get("SD_ORT_COMMIT"):
        return named

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
    import psutil

    return float(psutil.Process().memory_info().rss) / MEGABYTE
