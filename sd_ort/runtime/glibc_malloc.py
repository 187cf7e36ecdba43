"""glibc's malloc settings while sessions are opened. Without glibc these functions do nothing.

ONNX Runtime allocates and frees large tensors then: float32 weights of a folder's float16 ones, and packed ones of
these. After the first free glibc takes such blocks from its heap (mallopt(3), M_MMAP_THRESHOLD), which retains the
holes: 0.2 GB for SD 1.5's UNet. If a session is closed to be opened with other weights, the next one asks for the same
blocks: getting them from the system again takes a quarter of the CPU time.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # glibc's malloc.h
_INITIAL, _LARGEST = 128 << 10, 32 << 20  # M_MMAP_THRESHOLD in a new process, and the most it grows to
_MAPPINGS = 65536  # M_MMAP_MAX in a new process
_LIBC = None if sys.platform == "win32" else ctypes.CDLL(None)
_LOCK = threading.Lock()
_active = 0  # number of entered contexts of `retain_heap` and `return_heap`


def _set(*options: tuple[int, int]) -> None:
    if mallopt := getattr(_LIBC, "mallopt", None):
        for name, number in options:
            mallopt(name, number)


def disable_trim() -> None:
    """Take large blocks from the heap, and retain freed ones there, until the next sessions are open."""
    _set((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1))


def trim_heap() -> None:
    """Return the heap's free memory to the system."""
    if malloc_trim := getattr(_LIBC, "malloc_trim", None):
        malloc_trim(ctypes.c_size_t(0))


class Mallinfo2(ctypes.Structure):
    """glibc's struct mallinfo2 (mallinfo(3)), in bytes of all threads.

    `uordblks` and `fordblks` are used and free in heaps, and `hblkhd` is used outside of them.
    """

    _fields_ = [(name, ctypes.c_size_t) for name in
                "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]  # fmt: skip


def mallinfo() -> Mallinfo2:
    """Return the statistics of malloc; zeros without glibc 2.33."""
    function = getattr(_LIBC, "mallinfo2", None)
    if function is None:
        return Mallinfo2()
    function.restype = Mallinfo2
    return function()


def retain_heap() -> AbstractContextManager[None]:
    """Return the context in which malloc behaves as after `disable_trim`."""
    return _while_opening(disable_trim)


def return_heap() -> AbstractContextManager[None]:
    """Return the context in which freed blocks of 128 kB and more go back to the system at once."""
    return _while_opening(lambda: _set((_MMAP_MAX, _MAPPINGS), (_MMAP_THRESHOLD, _INITIAL)))


@contextmanager
def _while_opening(begin: Callable[[], None]) -> Iterator[None]:
    """Context manager for malloc settings. If contexts overlap (nested or in threads), the first one's settings apply.

    After the last one, large blocks come from the heap as in a process that ran for a while, and its end is trimmed.
    """
    global _active
    with _LOCK:
        _active += 1
        if _active == 1:
            begin()
    try:
        yield
    finally:
        with _LOCK:
            _active -= 1
            if not _active:
                _set((_MMAP_MAX, _MAPPINGS), (_MMAP_THRESHOLD, _LARGEST), (_TRIM_THRESHOLD, 2 * _LARGEST))
