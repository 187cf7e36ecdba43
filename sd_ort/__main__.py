"""The command `sd-ort`, which is `python -m sd_ort` too."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line. A Ctrl-C before it has begun ends the process, without Python's account of its imports."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from sd_ort.cli import main as command

    command()


if __name__ == "__main__":
    main()
