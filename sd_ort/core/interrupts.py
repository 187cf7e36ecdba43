"""Ctrl-C and SIGTERM, acted on within two seconds whatever a library is doing.

Python runs a signal's handler in its main thread, between two of its instructions: not while that thread is inside a
library, nor while any thread keeps the interpreter's lock there. So long work runs in other threads (`in_threads`), and
a second process (`guarded`) ends this one when the handler does not come to run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Name prefix of threads that an interrupt does not wait for: what they write is removed, and the process ends.
STOPPABLE = "sd-ort-stoppable"
INTERRUPTED = "sd-ort: interrupted; no half-written output is left."


_command = False
_came = False


def begin_command() -> None:
    """From now on this process is a command: SIGTERM interrupts it as Ctrl-C does, and `guarded` may end it."""
    global _command, _came
    _command, _came = True, False
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as a shell has it for what runs in the background
        signal.signal(signal.SIGINT, _interrupt)


def came() -> bool:
    """Whether this command was interrupted: some extensions' imports turn a KeyboardInterrupt into an ImportError."""
    return _came


def _interrupt(signum: int, frame: Any) -> None:
    global _came
    _came = True
    raise KeyboardInterrupt


def in_threads(make: Callable[[str, threading.Event], None], names: Iterable[str], at_once: int) -> None:
    """Call make(name, stopped) for all names in `at_once` threads; an error or interrupt sets `stopped` and is raised.

    An interrupt is raised at once. The threads may still be inside a library, for seconds; they write nothing after it.
    """
    stopped = threading.Event()
    pool = ThreadPoolExecutor(at_once, thread_name_prefix=STOPPABLE)
    running = [pool.submit(make, name, stopped) for name in names]
    interrupted = True
    try:
        for done in as_completed(running):
            interrupted = done.exception() is None
            done.result()
        interrupted = False
    finally:
        stopped.set()
        pool.shutdown(wait=not interrupted, cancel_futures=True)


@contextmanager
def held_back() -> Iterator[list[int]]:
    """Interrupts that come while the body runs raise nothing; the list says which came."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda n, frame: came.append(n)) for number in numbers}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def guarded(folder: Path) -> Iterator[None]:
    """While the body runs as a command, a second process (`watcher`) ends this one if it is not gone 1.5 s after a
    signal; `folder`, which holds what is half written, is then removed. An interrupt leaves it watching to the end: a
    thread that nobody waits for can keep the lock from whoever wants to exit."""
    if not _command or threading.current_thread() is not threading.main_thread():
        yield
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    script = str(Path(__file__).with_name("interrupt_watchdog.py"))
    watcher = subprocess.Popen(
        [sys.executable, "-I", "-S", script, str(os.getpid()), str(folder), INTERRUPTED],
        stdin=read, stdout=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    os.close(read)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException:
        _dismiss(watcher, write, before)
        raise
    _dismiss(watcher, write, before)


def _dismiss(watcher: subprocess.Popen[bytes], pipe: int, wakeup: int) -> None:
    signal.set_wakeup_fd(wakeup)
    os.close(pipe)
    watcher.wait()
