"""ray_watchdog.py FOLDER: end the processes of Ray that use FOLDER and remove it, once standard input is closed.

`ray_replicas.RayCluster` runs this script in a process of its own and holds the other end of the pipe. Linux closes it
even after `kill -9`, which some of Ray's own processes outlive by a minute.
"""

import os
import shutil
import signal
import sys
import time

import psutil


def uses(process: psutil.Process, folder: str) -> bool:
    """Return whether a process is one of Ray's with FOLDER in its command line, or an open file there."""
    try:
        command = " ".join(process.cmdline())
        is_ray = "/ray/" in command or command.startswith("ray::")
        return is_ray and (folder in command or any(file.path.startswith(folder) for file in process.open_files()))
    except psutil.Error:  # it has ended, or belongs to another user
        return False


def main() -> None:
    folder = sys.argv[1]
    os.read(0, 1)
    while processes := [each for each in psutil.process_iter() if uses(each, folder)]:
        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.02)  # they may have started others, or not be gone yet
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    main()
