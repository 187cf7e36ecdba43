"""Check locks, caches, replaced folders and Ctrl-C on Windows. `python -m scripts.checks.windows_python` runs it.

Prints a line for each thing that holds and exits with 1 at the first that does not.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sd_ort.core import files, locks, staging

HOLDER = """
import os, sys, time
from sd_ort.core import locks
lock = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
locks.lock(lock, int(sys.argv[2]))
print("locked", flush=True)
time.sleep(60)
"""

INTERRUPTED = """
import os, signal, sys, threading, time
from pathlib import Path
from sd_ort.core import interrupts, staging
interrupts.begin_command()
raises = signal.raise_signal if sys.platform == "win32" else lambda number: os.kill(os.getpid(), number)
threading.Timer(0.5, raises, [signal.SIGINT]).start()
begin = time.monotonic()
try:
    with staging.scratch_folder(Path(sys.argv[1]), "out") as work:
        (work / "half").write_text("written")
        if sys.argv[2] == "threads":
            interrupts.run_interruptible(lambda name, stopped: time.sleep(20), ["one"], 1)
        time.sleep(20)
except KeyboardInterrupt:
    print(interrupts.was_interrupted() and time.monotonic() - begin < 10, flush=True)
os._exit(0)  # without the thread, as a command that was interrupted
"""


def is_free(path: Path, kind: int) -> bool:
    """Return whether a file can be locked at once."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        locks.lock(descriptor, kind | locks.NON_BLOCKING)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def check(holds: bool, claim: str) -> None:
    print(f"{'holds' if holds else 'FAILS'}: {claim}", flush=True)
    if not holds:
        sys.exit(1)


def check_locks(folder: Path) -> None:
    """Locks of files between two processes."""
    path = folder / "lock"
    path.write_bytes(b"text")
    for kind, shared in ((locks.EXCLUSIVE, False), (locks.SHARED, True)):
        holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(path), str(kind)], stdout=subprocess.PIPE)
        assert holder.stdout is not None
        holder.stdout.readline()
        check(is_free(path, locks.SHARED) == shared, f"a {'shared' if shared else 'sole'} lock and a shared one")
        check(not is_free(path, locks.EXCLUSIVE), "no sole lock beside that of another process")
        check(path.read_bytes() == b"text", "a locked file is read")
        holder.kill()
        holder.wait()
        end = time.monotonic() + 10
        while not (free := is_free(path, locks.EXCLUSIVE)) and time.monotonic() < end:
            time.sleep(0.1)
        check(free, "a killed process leaves no lock")


def check_folders(folder: Path) -> None:
    """Check the replacement of folders, and the removal of a killed process's folders."""
    output = folder / "out"
    leftover = folder / ".out.partial-left"
    (leftover / "below").mkdir(parents=True)
    for text in ("first", "second"):
        with staging.scratch_folder(folder, "out") as work:
            check(not leftover.exists(), "the folder of a process that is gone is removed")
            files.write_text(work / "file.txt", text)
            staging.remove_leftovers(folder, ".out.partial-")
            check(work.is_dir(), "the folder of a process that lives stays")
            staging.replace_folder(work, output, keep=["user.txt"] if text == "second" else [])
        check((output / "file.txt").read_text() == text, f"the folder is replaced: {text}")
        files.write_text(output / "user.txt", "theirs")
    check((output / "user.txt").read_text() == "theirs", "a file of the user stays")
    check(sorted(path.name for path in folder.iterdir()) == ["lock", "out"], "nothing else is left")


def check_files(folder: Path) -> None:
    """Bytes that a text mode would change."""
    path, data = folder / "out/bytes", b"a\r\nb\x1ac\n"
    files.write_bytes(path, data)
    check(files.read_regular(path) == data, "files are read as they are written, line ends and Ctrl-Z too")


def check_interrupts(folder: Path) -> None:
    """SIGINT, to which C's runtime turns a Ctrl-C: it ends a wait, and no half-written output is left."""
    before = sorted(folder.iterdir())
    for where in ("call", "threads"):
        command = [sys.executable, "-c", INTERRUPTED, str(folder), where]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        check(done.stdout.strip() == "True", f"a Ctrl-C ends a {where.removesuffix('s')} that waits")
        check(sorted(folder.iterdir()) == before, "nothing half-written is left")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        for function in (check_locks, check_folders, check_files, check_interrupts):
            function(Path(scratch))
