"""The C library's allocator, while sessions are opened.

ONNX Runtime makes large tensors then and frees them again: float32 weights out of a folder's float16 ones, and packed
ones out of these. glibc learns from the first that is freed to take the next from its heap (mallopt(3),
M_MMAP_THRESHOLD), which keeps the holes: 0.2 GB of SD 1.5's UNet. Where a session is closed to be opened with other
weights, what it gives back is what the next one asks for: to get that from the system again takes a quarter of the
processor's time. Nothing here does anything without glibc.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # glibc's malloc.h
_AT_FIRST, _AT_MOST = 128 << 10, 32 << 20  # what M_MMAP_THRESHOLD is in a new process, and what it grows to by itself
_MAPPINGS = 65536  # what M_MMAP_MAX is in a new process
_LOCK = threading.Lock()
_lasting = 0  # `kept` and `given_back`


def _set(*options: tuple[int, int]) -> None:
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        for name, number in options:
            mallopt(name, number)


def keep_freed() -> None:
    """Large blocks are taken from the heap, and what is freed stays there for the next, until sessions were opened."""
    _set((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1))


def give_back() -> None:
    """What the heap keeps free goes back to the system."""
    if malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        malloc_trim(ctypes.c_size_t(0))


def kept() -> AbstractContextManager[None]:
    """While it lasts, as after `keep_freed`."""
    return _while_opening(keep_freed)


def given_back() -> AbstractContextManager[None]:
    """While it lasts, what is freed of 128 kB and more goes back to the system at once."""
    return _while_opening(lambda: _set((_MMAP_MAX, _MAPPINGS), (_MMAP_THRESHOLD, _AT_FIRST)))


@contextmanager
def _while_opening(begin: Callable[[], None]) -> Iterator[None]:
    """Of those that last at once, nested or in threads, the first to begin decides. After the last one blocks are taken
    from the heap as large as they would be in a process that ran for a while, and the heap's end is given back."""
    global _lasting
    with _LOCK:
        _lasting += 1
        if _lasting == 1:
            begin()
    try:
        yield
    finally:
        with _LOCK:
            _lasting -= 1
            if not _lasting:
                _set((_MMAP_MAX, _MAPPINGS), (_MMAP_THRESHOLD, _AT_MOST), (_TRIM_THRESHOLD, 2 * _AT_MOST))
