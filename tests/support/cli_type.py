"""Type of the fixture `sd_ort`, and helpers for commands that must succeed, or must be refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

# Runs `sd-ort ARGS...`: (exit code, stdout, stderr).
Cli = Callable[..., tuple[int, str, str]]


def success(sd_ort: Cli, *arguments: object) -> str:
    """Return what `sd-ort ARGUMENTS` writes to stdout: code 0."""
    code, text, error = sd_ort(*arguments)
    assert code == 0, error
    return text


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
