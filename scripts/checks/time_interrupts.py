"""Time what a signal takes: run a command again and again and interrupt it ever later.

    python scripts/checks/time_interrupts.py OUT --runs 8 -- sd-ort export demo OUT

OUT must not exist; it is what the command writes, and it is removed when a run ended before its signal. Prints a line
a run: when the signal was sent, the seconds until the process was gone, its exit code. Exits with 1 when one took more
than `--limit` seconds, left something beside OUT, or ended with another code than 130 (-9: the watchdog ended it).
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path


def interrupt(command: list[str], after: float, number: signal.Signals) -> tuple[float | None, int]:
    """(seconds from the signal to the end, or None when the command ended before it; exit code)."""
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a shell's background ignores it
    )  # fmt: skip
    try:
        return None, process.wait(after)
    except subprocess.TimeoutExpired:
        pass
    sent = time.monotonic()
    process.send_signal(number)
    code = process.wait()
    return time.monotonic() - sent, code


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("command", nargs="+")
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--first", type=float, default=1.0, help="Seconds to the first run's signal.")
    parser.add_argument("--factor", type=float, default=1.7, help="From one run's to the next.")
    parser.add_argument("--limit", type=float, default=2.0)
    options = parser.parse_args()
    beside, failed = {path.name for path in options.out.parent.iterdir()}, False
    for run in range(options.runs):
        number = (signal.SIGTERM, signal.SIGINT)[run % 2]
        after = options.first * options.factor**run
        seconds, code = interrupt(options.command, after, number)
        left = {path.name for path in options.out.parent.iterdir()} - beside
        if seconds is None or code == 0:
            print(f"{after:8.1f} s  ended before the signal with {code}", flush=True)
            shutil.rmtree(options.out, ignore_errors=True)
            break
        wrong = seconds > options.limit or left or code not in (130, -signal.SIGKILL)
        failed |= bool(wrong)
        said = f"left {', '.join(left)}" if left else ""
        print(f"{after:8.1f} s  {number.name}  gone after {seconds:5.2f} s, exit code {code} {said}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
