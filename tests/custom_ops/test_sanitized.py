"""A small operator under the sanitizers; scripts/checks/sanitize_ops.py does all of them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "checks" / "sanitize_ops.py"


@pytest.mark.skipif(shutil.which("g++") is None, reason="GCC is what brings libasan.so")
def test_right_and_hostile_nodes_make_no_fault() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--operators", "skip_layer_norm", "--nodes", "20"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no fault" in done.stdout
