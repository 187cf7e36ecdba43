"""Readers-writer lock between captures of GPU graphs and the device calls of other threads.

CUDA fails a plain copy (error 906) and HIP a wait for the device while any thread captures, and both then end that
capture. The rules:

    exclusive    the capture of a run
    shared       opening a session, uncaptured runs, copies to and from OrtValues, and allocations on a device
    neither      launches of instantiated graphs, events, and waits for one stream

The last reference to a session may go in any thread, without the lock, and closing one ends captures on CUDA. So does
what other libraries do. `gpu_graphs.capture_graph` and `bound_run.BoundRun` repeat a capture that failed.

A thread inside either side may enter any side again. A thread that waits for the exclusive side makes no device call,
so its shared side counts as left meanwhile. A shared section must not wait for another thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


class _Thread(threading.local):
    """`depth`: of the calling thread's shared sections."""

    depth = 0


class CaptureLock:
    """Readers-writer lock, reentrant on both sides. Waiting captures go before new shared sections."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._thread = _Thread()
        self._sharing = 0  # threads on the shared side
        self._capturing: int | None = None  # the thread on the exclusive side
        self.waiting = 0  # threads that wait for the exclusive side

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Make device calls that no other thread's capture survives."""
        enters = not self._thread.depth and self._capturing != threading.get_ident()
        if enters:
            with self._changed:
                self._changed.wait_for(lambda: self._capturing is None and not self.waiting)
                self._sharing += 1
        self._thread.depth += 1
        try:
            yield
        finally:
            self._thread.depth -= 1
            if enters:
                self._share(-1)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Capture a run: other threads are in no section, and enter none until it ends."""
        if self._capturing == threading.get_ident():
            yield
            return
        own = int(self._thread.depth > 0)
        with self._changed:
            self.waiting += 1
            self._share(-own)
            try:
                self._changed.wait_for(lambda: self._capturing is None and not self._sharing)
                self._capturing = threading.get_ident()
            finally:  # an interrupt may end the wait
                self.waiting -= 1
                self._share(own)
        try:
            yield
        finally:
            with self._changed:
                self._capturing = None
                self._changed.notify_all()

    def _share(self, count: int) -> None:
        with self._changed:
            self._sharing += count
            self._changed.notify_all()


CAPTURE_LOCK = CaptureLock()


def device_calls(device: str) -> AbstractContextManager[None]:
    """Return the context for calls that would end a capture on `device`; on a CPU there are none."""
    return nullcontext() if device == "cpu" else CAPTURE_LOCK.shared()
