"""Shared libraries without functions, and environments with an installed wheel."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path


def empty_library(path: Path, *options: str) -> Path:
    """Create a shared library without functions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["gcc", "-shared", "-x", "c", "/dev/null", "-x", "none", "-o", str(path), *options]
    subprocess.run(command, check=True)
    return path


def installed_wheel(wheel: Path, folder: Path, run: Callable[..., object]) -> Path:
    """Install a wheel in a new environment with this environment's dependencies; return its folder of programs.

    run: function that runs a command.
    """
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    python = folder / "venv/bin/python"
    pip = ["-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--disable-pip-version-check"]
    run(sys.executable, *pip, wheel)
    (site,) = (folder / "venv/lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python.parent
