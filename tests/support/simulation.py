"""Commands and functions on a simulated AMD GPU, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SIMULATE = ROOT / "scripts/amd/simulate"


def simulate(
    target: str, command: list[str], *options: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    variables = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests/support'}"} | (environment or {})
    return subprocess.run(
        [sys.executable, str(SIMULATE), target, *options, "--", *command],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def run_client(function: Callable, target: str, *arguments: object, options: tuple[str, ...] = ()) -> Any:
    """Return the result of a test module's function, called with a Hip in a process under scripts/amd/simulate."""
    source = Path(function.__code__.co_filename)
    command = [sys.executable, str(ROOT / "tests/amd/hip_client.py"), str(source.parent)]
    command += [source.stem, function.__name__, *map(str, arguments)]
    result = simulate(target, command, *options)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)
