"""Handlers of Ctrl-C and SIGTERM that act within two seconds, even during a long library call.

Python runs a signal handler in the main thread, between two instructions: not during a library call of that thread, nor
while a thread holds the GIL in one. So long work runs in other threads (`run_interruptible`), and a watchdog process
(`with_watchdog`) ends this process if the handler does not run.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sd_ort.core.errors import InputError

# Name prefix of threads that an interrupt does not wait for: their output is removed, and the process ends.
STOPPABLE = "sd-ort-stoppable"
INTERRUPTED = "sd-ort: interrupted; no half-written output is left."
# On Windows no signal ends a wait for another thread, so that Python's handler runs only after it.
_WAIT_SECONDS = 0.2 if sys.platform == "win32" else None

DIVIDED = (
    "\nsd-ort: a graph divides integers by 0, or the least integer by -1, which ends ONNX Runtime: do not trust the "
    "model, or give inputs that it is made for.\n"
)

_command = False
_interrupted = False


def begin_command() -> None:
    """Make this process a command: SIGTERM interrupts it as Ctrl-C does, and `with_watchdog` may end it."""
    global _command, _interrupted
    _command, _interrupted = True, False
    signal.signal(signal.SIGTERM, _interrupt)
    if sys.platform != "win32":  # where a division by 0 is no signal
        ctypes.CDLL(None).signal(signal.SIGFPE, _division_handler)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as a shell has it for what runs in the background
        signal.signal(signal.SIGINT, _interrupt)


def _end_at_division(signum: int) -> None:
    """Handle SIGFPE in a thread of ONNX Runtime, which cannot go on: Python's own handlers would return to it."""
    os.write(2, DIVIDED.encode())
    os._exit(InputError.exit_code)


_division_handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(_end_at_division)  # C keeps no reference


def was_interrupted() -> bool:
    """Whether this command was interrupted: some extensions' imports turn a KeyboardInterrupt into an ImportError."""
    return _interrupted


def _interrupt(signum: int, frame: Any) -> None:
    global _interrupted
    _interrupted = True
    raise KeyboardInterrupt


def run_interruptible(make: Callable[[str, threading.Event], None], names: Iterable[str], at_once: int) -> None:
    """Call make(name, stopped) for all names in `at_once` threads; an error or interrupt sets `stopped` and is raised.

    An interrupt is raised at once. The threads may remain in a library call for seconds, and write nothing after it.
    """
    stopped = threading.Event()
    pool = ThreadPoolExecutor(at_once, thread_name_prefix=STOPPABLE)
    interrupted = True
    try:
        pending = {pool.submit(make, name, stopped) for name in names}
        while pending:
            done, pending = wait(pending, _WAIT_SECONDS, FIRST_COMPLETED)
            for future in done:
                interrupted = future.exception() is None
                future.result()
        interrupted = False
    finally:
        stopped.set()
        pool.shutdown(wait=not interrupted, cancel_futures=True)


def run_coroutine(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in an event loop; SIGINT and SIGTERM cancel it.

    KeyboardInterrupt is raised after a cancelled coroutine has ended.

    If a handler raised KeyboardInterrupt inside a task, asyncio would print the stack of that task.
    """
    import asyncio

    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        task = loop.create_task(main)
        with defer_interrupts(lambda: loop.call_soon_threadsafe(task.cancel)) as signals:
            try:
                loop.run_until_complete(task)
            except (Exception, asyncio.CancelledError):
                if not signals:
                    raise
        if signals:
            raise KeyboardInterrupt


@contextmanager
def defer_interrupts(on_signal: Callable[[], object] = lambda: None) -> Iterator[list[int]]:
    """Defer the signals of a block: they raise nothing, are appended to the list, and call `on_signal`."""
    signals: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return

    def handle(number: int, frame: Any) -> None:
        signals.append(number)
        on_signal()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def with_watchdog(folder: Path) -> Iterator[None]:
    """Run a block of a command under a watchdog process.

    It ends this process 1.5 s after a signal and then removes `folder` with its incomplete output. After an interrupt
    the watchdog stays until this process has ended, since an abandoned thread can hold the GIL. Windows has no
    watchdog: it cannot wait for a pipe with a timeout.
    """
    if not _command or sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
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
