"""The command line itself: what it imports before a command is chosen."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sd_ort import cli

HEAVY = ("torch", "onnxruntime", "diffusers", "transformers", "onnx", "onnx_ir", "numpy", "ray", "uvicorn")


def test_help_imports_nothing_heavy() -> None:
    """In a process of its own, since this one has imported them all."""
    code = (
        "import contextlib, io, sys; from sd_ort.cli import main; sys.argv = ['sd-ort', '--help']\n"
        "with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit): main()\n"
        f"print('generate' in out.getvalue(), *(name for name in {HEAVY} if name in sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["True"]


def test_windows_is_told_what_runs_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit, match=r"sd-ort: runs on Linux, and on Windows in WSL\."):
        cli.main()
