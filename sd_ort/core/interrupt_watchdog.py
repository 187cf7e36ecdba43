"""interrupt_watchdog.py PID FOLDER TEXT: end a process that ignores a signal, and remove its incomplete output.

`interrupts.with_watchdog` runs this script in a process of its own, which starts in milliseconds. The watched process's
C code writes a byte for each signal to the pipe on standard input, which is closed when no watchdog is needed.
"""

import os
import select
import shutil
import signal
import sys
import time

PATIENCE = 1.5  # seconds


def main() -> None:
    pid, folder, text = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    if not os.read(0, 1):
        return
    end = time.monotonic() + PATIENCE
    while select.select([0], [], [], max(0.0, end - time.monotonic()))[0]:
        if not os.read(0, 1):
            return
    os.kill(pid, signal.SIGKILL)
    while os.read(0, 64):  # until the system has closed it: then nothing more is written
        pass
    shutil.rmtree(folder, ignore_errors=True)
    print(text, file=sys.stderr)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    main()
