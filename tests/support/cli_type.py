"""Type of the fixture `sd_ort`, and the message of a command that it must refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

# Runs `sd-ort ARGS...`: (exit code, stdout, stderr).
Cli = Callable[..., tuple[int, str, str]]


def refusal(sd_ort: Cli, folder: Path, *arguments: object) -> str:
    """Return the one line of `sd-ort ARGUMENTS` beside progress: code 2, and the same names in `folder`."""
    before = sorted(folder.iterdir())
    code, _, error = sd_ort(*arguments)
    assert code == 2
    lines = [line for line in error.splitlines() if not line.startswith(("[", "file.safetensors:"))]
    assert len(lines) == 1, error
    assert lines[0].startswith("sd-ort: ")
    assert sorted(folder.iterdir()) == before
    return lines[0]
