"""The examples and the commands of the tutorials, each as a user runs it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TUTORIALS = sorted((ROOT / "docs" / "tutorial").glob("*.md"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example: Path, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(example.parents[1])}
    result = subprocess.run(
        [sys.executable, str(example)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial(page: Path, tmp_path: Path) -> None:
    """The commands of a tutorial, in their order, as the page shows them."""
    environment = os.environ | {"PYTHONPATH": str(page.parents[2])}
    commands = [line.strip() for line in page.read_text().splitlines() if line.startswith("    sd-ort ")]
    assert commands
    for command in commands:
        words = [sys.executable, "-m", *shlex.split(command.replace("sd-ort", "sd_ort", 1))]
        result = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, f"{command}\n{result.stderr}"
