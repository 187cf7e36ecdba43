"""The command line itself: what it imports before a command is chosen."""

from __future__ import annotations

import signal
import subprocess
import sys

HEAVY = ("torch", "onnxruntime", "diffusers", "transformers", "onnx", "onnx_ir", "numpy", "ray", "uvicorn")


def test_an_interrupt_that_became_an_import_error_is_one() -> None:
    """Extensions whose import is interrupted say that their initialization failed."""
    code = (
        "import os, signal, sys, click, sd_ort.cli\n"
        "@click.command()\n"
        "def command():\n"
        "    try: os.kill(os.getpid(), signal.SIGINT)\n"
        "    except KeyboardInterrupt: pass\n"
        "    raise ImportError('initialization failed')\n"
        "sd_ort.cli.cli, sys.argv = command, ['sd-ort']\n"
        "sd_ort.cli.main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert result.stderr.strip() == "sd-ort: interrupted; no half-written output is left."
    assert result.returncode == 130


def test_help_imports_nothing_heavy() -> None:
    """In a process of its own, since this one has imported them all."""
    code = (
        "import contextlib, io, sys; from sd_ort.cli import main; sys.argv = ['sd-ort', '--help']\n"
        "with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit): main()\n"
        f"print('generate' in out.getvalue(), *(name for name in {HEAVY} if name in sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["True"]
