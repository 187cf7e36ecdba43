"""Lock between captures of GPU graphs and the calls of other threads that would end them.

HIP ends every capture of the process at a call that waits for a device or copies without a stream, in any thread, and
refuses that call too. Opening a session makes such calls. CUDA ends a capture at the copies of an opening.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class DeviceCalls:
    """Sections that many threads run at a time, and that no thread runs while another one captures."""

    def __init__(self) -> None:
        self._condition = threading.Condition()  # its lock, which is reentrant, is held during a capture
        self._sections = 0

    @contextmanager
    def section(self) -> Iterator[None]:
        """Make calls that would end a capture. The section must not wait for another thread."""
        with self._condition:
            self._sections += 1
        try:
            yield
        finally:
            with self._condition:
                self._sections -= 1
                self._condition.notify_all()

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Keep other threads out of their sections, once all have left. Must not be entered from a section."""
        with self._condition:
            self._condition.wait_for(lambda: self._sections == 0)
            yield


DEVICE_CALLS = DeviceCalls()
