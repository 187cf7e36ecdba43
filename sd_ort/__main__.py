"""The command `sd-ort`, which is `python -m sd_ort` too."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading


def main() -> None:
    """Run the command line. A Ctrl-C before it has begun ends the process, without Python's account of its imports."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from sd_ort.cli import main as command

    command()


def run() -> None:
    """Run the command line and end the process.

    After a command that succeeded and left no thread, without Python's teardown, which would free all sessions and
    device memory one by one: the system does it at once.
    """
    try:
        main()
    except SystemExit as exit_:
        if exit_.code or threading.active_count() > 1:
            raise
    if threading.active_count() > 1:
        return
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    run()
