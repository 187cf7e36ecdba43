"""The provider's own GPU kernels on emulated lanes: those whose threads do more than one element each.

Its other kernels are functions of one index, which the host vendor's tests run through the provider.
"""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest
from emulation import ROOT, compile_object, link

from custom_ops.check.memory import Guarded, HostMemory

MOST_PARTS = 32
MANY = 1 << 18  # pieces, from which on a thread moves four
DEVICE = "nvidia"  # nothing here depends on how many lanes a wave has

CALLS = """
#include "provider/kernels/kernels.h"
extern "C" const char* join(const sd_ort::Join& call) { return sd_ort::join(call, nullptr); }
extern "C" const char* reduce(int op, int dtype, const void* x, void* y, int64_t outer, int64_t size, int64_t inner) {
  return sd_ort::reduce(static_cast<sd_ort::Reduction>(op), static_cast<sd_ort::DType>(dtype), x, y, outer, size, inner,
                        nullptr);
}
"""


class Join(ctypes.Structure):
    """As in provider/kernels/kernels.h."""

    _fields_ = (
        ("joined", ctypes.c_void_p),
        ("parts", ctypes.c_void_p * MOST_PARTS),
        ("begins", ctypes.c_int32 * (MOST_PARTS + 1)),
        ("width", ctypes.c_int32),
        ("count", ctypes.c_int32),
        ("element_bytes", ctypes.c_int),
        ("rows", ctypes.c_int64),
        ("apart", ctypes.c_bool),
    )


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("provider_kernels")
    (folder / "calls.cc").write_text(CALLS)
    own = [ROOT / "custom_ops/provider/kernels" / name for name in ("movement.hip", "reduction.hip")]
    objects = [compile_object(source, DEVICE, folder) for source in [folder / "calls.cc", *own]]
    library = ctypes.CDLL(str(link(objects, folder / "kernels.so")))
    for function in (library.join, library.reduce):
        function.restype = ctypes.c_char_p
    library.reduce.argtypes = [*[ctypes.c_int] * 2, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3]
    return library


def check_join(
    kernels: ctypes.CDLL,
    widths: list[int],
    *,
    rows: int,
    element_bytes: int,
    apart: bool,
    margin: int = 1,
    left_out: int | None = None,
) -> None:
    """Parts of `widths` elements a row, `left_out` of them null; `joined` has `margin` elements more at either end."""
    random, memory = np.random.default_rng(sum(widths)), HostMemory()
    spans = [margin, *widths, margin]
    drawn = [random.integers(1, 256, (rows, span * element_bytes), np.uint8) for span in spans]
    columns = np.cumsum([0, *spans])
    given = [np.concatenate(drawn, axis=1), *drawn[1:-1]]
    guarded = [Guarded(memory, array if apart == (i == 0) else np.zeros_like(array)) for i, array in enumerate(given)]
    call = Join(guarded[0].address, width=columns[-1], count=len(widths), element_bytes=element_bytes)
    call.rows, call.apart = rows, apart
    call.begins[: len(widths) + 1] = columns[1:-1].tolist()
    call.parts[: len(widths)] = [None if i == left_out else part.address for i, part in enumerate(guarded[1:])]
    assert kernels.join(ctypes.byref(call)) is None
    wanted = [array.copy() for array in given]
    for part in range(-1, len(widths) + 1):  # what nothing was to be written to
        if part in (-1, len(widths), left_out):
            if apart and part == left_out:
                wanted[part + 1][:] = 0
            elif not apart:
                wanted[0][:, columns[part + 1] * element_bytes : columns[part + 2] * element_bytes] = 0
    for buffer, array in zip(guarded, wanted, strict=True):
        got, is_whole = buffer.read()
        assert is_whole
        np.testing.assert_array_equal(got, array)


@pytest.mark.parametrize("element_bytes", [1, 2, 4, 8])
def test_ragged_parts(kernels: ctypes.CDLL, element_bytes: int) -> None:
    """One part to five and as many as a launch takes, of odd widths, of one element and of none."""
    ragged = [[7], [5, 1], [1, 12, 3], [3, 0, 9, 1], [13, 1, 4, 2, 8], [*range(1, MOST_PARTS + 1)]]
    for number, widths in enumerate(ragged):
        turn, middle = number % 2 == 0, len(widths) // 2
        check_join(kernels, widths, rows=3 + number, element_bytes=element_bytes, apart=turn)
        check_join(kernels, widths, rows=2, element_bytes=element_bytes, apart=not turn, left_out=middle)


@pytest.mark.parametrize(("element_bytes", "apart"), [(1, False), (2, True), (4, True), (8, False)])
def test_four_pieces_a_thread(kernels: ctypes.CDLL, element_bytes: int, apart: bool) -> None:
    """An element a piece, since a width is odd, or 16 bytes; the last block of threads is not full."""
    together = 16 // element_bytes if element_bytes > 2 else 1
    widths = [together * pieces for pieces in (5, 1, 13, 12)]
    rows = MANY // 31 + 1
    check_join(kernels, widths, rows=rows, element_bytes=element_bytes, apart=apart, margin=together)


@pytest.mark.parametrize("size", [7, 512, 513, 1300])
def test_sums_of_many_numbers(kernels: ctypes.CDLL, size: int) -> None:
    """A thread an output up to 512 numbers, a block beyond; NaN of one column stays there."""
    x = np.random.default_rng(size).normal(size=(2, size, 3)).astype(np.float32)
    x[1, size // 2, 2] = np.nan
    for dtype, (kind, bound) in enumerate([(np.float32, 1e-6), (np.float16, 1e-3), (ml_dtypes.bfloat16, 1e-2)]):
        given = x.astype(kind)
        for op, wanted in enumerate([np.max, np.mean, np.min, np.sum]):
            source, y = Guarded(HostMemory(), given), Guarded(HostMemory(), np.zeros((2, 3), kind))
            assert kernels.reduce(op, dtype, source.address, y.address, 2, size, 3) is None
            got, is_whole = y.read()
            assert is_whole
            right = wanted(given.astype(np.float64), axis=1)
            np.testing.assert_allclose(got.astype(np.float64), right, rtol=bound, atol=bound * np.sqrt(size) / 8)
