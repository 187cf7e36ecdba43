"""Where the C library takes memory from while sessions are opened."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from sd_ort.runtime.glibc_malloc import disable_trim, mallinfo, retain_heap, return_heap

MB = 1 << 20

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc 2.33 alone tells")


def no_hole() -> int:
    """A size that fits in nothing the heap has free: what ran before in this process may have left holes."""
    return int(mallinfo().fordblks) + 300 * MB


def mapped() -> bool:
    """Whether a block that fits in no hole is taken from the system for itself."""
    np.empty(MB, np.uint8)  # glibc looks at the heap's end when something is freed
    before, size = mallinfo().hblkhd, no_hole()
    block = np.empty(size, np.uint8)
    return mallinfo().hblkhd >= before + block.nbytes


def stays() -> bool:
    """Whether such a block stays in the heap when it is freed."""
    size = no_hole()
    np.empty(size, np.uint8)
    return mallinfo().fordblks >= size


def test_what_is_freed_goes_back_or_stays() -> None:
    with return_heap():
        assert mapped()
        assert not stays()
    with retain_heap():
        assert not mapped()
        assert stays()
    assert mapped()


def test_retained_heap_is_not_trimmed() -> None:
    disable_trim()
    assert stays()
    with retain_heap():
        assert not mapped()
    assert mapped()


def test_a_hole_in_the_heap_decides_nothing() -> None:
    with retain_heap():
        hole = np.empty(no_hole(), np.uint8)
        above = np.empty(no_hole(), np.uint8)  # in no hole of before either, so that `hole` is not the heap's end
        size = hole.nbytes
        del hole
    assert mallinfo().fordblks >= size
    assert above.nbytes >= MB
    with return_heap():
        assert mapped()
    with retain_heap():
        assert not mapped()


def test_first_of_concurrent_blocks_decides() -> None:
    def opened() -> None:
        with return_heap():
            pass

    with retain_heap(), ThreadPoolExecutor(1) as threads:
        threads.submit(opened).result()
        assert not mapped()
    assert mapped()
