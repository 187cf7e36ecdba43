"""Readers-writer lock between captures of GPU graphs and the device calls of other threads.

CUDA fails a plain copy (error 906) and HIP a wait for the device while any thread captures, and both then end that
capture. The rules:

    exclusive    the capture of a run
    shared       opening a session, uncaptured runs, copies to and from OrtValues, and allocations on a device
    neither      launches of instantiated graphs, events, and waits for one stream

A thread inside either side may enter any side again. A thread that waits for the exclusive side makes no device call,
so its shared side counts as left meanwhile. A shared section must not wait for another thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


class CaptureLock:
    """Readers-writer lock, reentrant on both sides. Waiting captures go before new shared sections."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._shared: dict[int, int] = {}  # thread -> depth of its shared sections
        self._capturing: int | None = None  # the thread on the exclusive side
        self.waiting = 0  # threads that wait for the exclusive side

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Make device calls that no other thread's capture survives."""
        thread = threading.get_ident()
        with self._changed:
            if self._capturing != thread and thread not in self._shared:
                self._changed.wait_for(lambda: self._capturing is None and not self.waiting)
            self._shared[thread] = self._shared.get(thread, 0) + 1
        try:
            yield
        finally:
            with self._changed:
                self._shared[thread] -= 1
                if not self._shared[thread]:
                    del self._shared[thread]
                    self._changed.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Capture a run: other threads are in no section, and enter none until it ends."""
        thread = threading.get_ident()
        with self._changed:
            if nested := self._capturing == thread:
                depth = 0
            else:
                depth = self._shared.pop(thread, 0)
                self.waiting += 1
                self._changed.notify_all()
                try:
                    self._changed.wait_for(lambda: self._capturing is None and not self._shared)
                    self._capturing = thread
                finally:  # an interrupt may end the wait
                    self.waiting -= 1
                    if depth:
                        self._shared[thread] = depth
        try:
            yield
        finally:
            if not nested:
                with self._changed:
                    self._capturing = None
                    self._changed.notify_all()


CAPTURE_LOCK = CaptureLock()


def device_calls(device: str) -> AbstractContextManager[None]:
    """Return the context for calls that would end a capture on `device`; on a CPU there are none."""
    return nullcontext() if device == "cpu" else CAPTURE_LOCK.shared()
