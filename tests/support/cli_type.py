"""Type of the fixture `sd_ort`."""

from __future__ import annotations

from collections.abc import Callable

# Runs `sd-ort ARGS...`: (exit code, stdout, stderr).
Cli = Callable[..., tuple[int, str, str]]
