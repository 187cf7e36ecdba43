"""The `sd-ort` command: names, options and exit codes. Each subcommand imports its stage only when it runs."""

from __future__ import annotations

import importlib
import io
import os
import sys
import threading
import traceback
from typing import NoReturn

import click

from sd_ort.core.errors import describe_error
from sd_ort.core.interrupts import INTERRUPTED, STOPPABLE, begin_command, was_interrupted

# Subcommand -> one line of help. Each lives in sd_ort/cli/<name>.py as `command`.
COMMANDS = {
    "export": "Turn a diffusers checkpoint into an ONNX pipeline folder.",
    "optimize": "Fuse an ONNX pipeline for a target and precision.",
    "verify": "Compare an optimized pipeline's numbers with its source's.",
    "explain": "Say which sites are fused, and why others are not.",
    "extract": "Cut a subgraph out of a component, for a bug report.",
    "merge": "Write a whole pipeline as one ONNX model.",
    "generate": "Generate images from a prompt.",
    "serve": "Answer requests for images over HTTP, on several GPUs.",
    "benchmark": "Measure latency and memory, engines side by side.",
    "cache": "List or clear the checkpoints that were optimized before.",
    "tune": "Measure kernel candidates at a model's shapes, ahead of time.",
    "report": "Turn benchmark results into an HTML page, or compare two runs.",
    "build-ops": "Compile the fused operators for CPU, AMD or NVIDIA.",
    "install-host": "Put sd-ort into ComfyUI, a WebUI, or a folder for diffusers.",
    "uninstall-host": "Take it out again.",
    "doctor": "Say what is installed, which providers load, and what is missing.",
}


class LazyGroup(click.Group):
    """A click group that imports a subcommand's module only when it is called, so that --help stays fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        return importlib.import_module(f"sd_ort.cli.{name.replace('-', '_')}").command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="sd-ort")
def cli() -> None:
    """Make Stable Diffusion fast through ONNX Runtime."""


def main() -> None:
    """Entry point: every error becomes one line on stderr and an exit code; Ctrl-C and SIGTERM exit with 130."""
    begin_command()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files need not be text
    try:
        sys.exit(cli.main(standalone_mode=False))
    except click.exceptions.Exit as exit_:
        sys.exit(exit_.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort) as interrupt:
        # A progress bar that no `with` closed yet is closed, and drawn once more, when its frame goes: before this.
        traceback.clear_frames(interrupt.__traceback__)
        _leave()
    except Exception as error:
        if was_interrupted():
            _leave()
        if os.environ.get("SD_ORT_TRACEBACK"):
            raise
        line, code = describe_error(error)
        click.echo(f"sd-ort: {line}", err=True)
        sys.exit(code)


def _leave() -> NoReturn:
    """Exit after an interrupt, without waiting for threads that are inside a library: Python would wait for each."""
    click.echo(INTERRUPTED, err=True)
    if any(thread.name.startswith(STOPPABLE) for thread in threading.enumerate()):
        sys.stdout.flush()
        os._exit(130)
    sys.exit(130)
