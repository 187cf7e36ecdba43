"""The C library's allocator, while a session is opened.

ONNX Runtime makes large tensors then and frees them again: float32 weights out of a folder's float16 ones, and packed
ones out of these. glibc learns from the first that is freed to take the next from its heap (mallopt(3),
M_MMAP_THRESHOLD), which keeps the holes: 0.2 GB of SD 1.5's UNet.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_AT_FIRST, _AT_MOST = 128 << 10, 32 << 20  # what M_MMAP_THRESHOLD is in a new process, and what it grows to by itself


@contextmanager
def given_back() -> Iterator[None]:
    """While it lasts, what is freed of 128 kB and more goes back to the system at once. Afterwards blocks are taken
    from the heap as large as they would be in a process that ran for a while. Does nothing without glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(_MMAP_THRESHOLD, _AT_FIRST)
    try:
        yield
    finally:
        mallopt(_MMAP_THRESHOLD, _AT_MOST)
        mallopt(_TRIM_THRESHOLD, 2 * _AT_MOST)
