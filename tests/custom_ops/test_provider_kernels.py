"""GPU kernels of the provider in the kernel emulator, if their threads process several elements.

The other kernels are functions of one index, which tests on the simulated device run through the provider.
"""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest
from emulation import ROOT, compile_object, link

from custom_ops.check.memory import Guarded, HostMemory

MAX_PARTS = 32
MANY = 1 << 18  # elements from which on a thread copies four
DEVICE = "nvidia"  # the result does not depend on the wave size

CALLS = """
#include "provider/kernels/kernels.h"
extern "C" const char* concat(const sd_ort::ConcatCall& call) { return sd_ort::concat(call, nullptr); }
extern "C" const char* reduce(int op, int dtype, const void* x, void* y, int64_t outer, int64_t size, int64_t inner) {
  return sd_ort::reduce(static_cast<sd_ort::Reduction>(op), static_cast<sd_ort::DType>(dtype), x, y, outer, size, inner,
                        nullptr);
}
"""


class ConcatCall(ctypes.Structure):
    """struct ConcatCall of provider/kernels/kernels.h."""

    _fields_ = (
        ("full", ctypes.c_void_p),
        ("parts", ctypes.c_void_p * MAX_PARTS),
        ("begins", ctypes.c_int32 * (MAX_PARTS + 1)),
        ("width", ctypes.c_int32),
        ("count", ctypes.c_int32),
        ("element_bytes", ctypes.c_int),
        ("rows", ctypes.c_int64),
        ("split", ctypes.c_bool),
    )


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("provider_kernels")
    (folder / "calls.cc").write_text(CALLS)
    own = [ROOT / "custom_ops/provider/kernels" / name for name in ("movement.hip", "reduction.hip")]
    objects = [compile_object(source, DEVICE, folder) for source in [folder / "calls.cc", *own]]
    library = ctypes.CDLL(str(link(objects, folder / "kernels.so")))
    for function in (library.concat, library.reduce):
        function.restype = ctypes.c_char_p
    library.reduce.argtypes = [*[ctypes.c_int] * 2, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3]
    return library


def check_concat(
    kernels: ctypes.CDLL,
    widths: list[int],
    *,
    rows: int,
    element_bytes: int,
    split: bool,
    margin: int = 1,
    skipped: int | None = None,
) -> None:
    """Check parts of `widths` columns, part `skipped` null; `full` has `margin` more columns at both ends."""
    random, memory = np.random.default_rng(sum(widths)), HostMemory()
    spans = [margin, *widths, margin]
    parts = [random.integers(1, 256, (rows, span * element_bytes), np.uint8) for span in spans]
    columns = np.cumsum([0, *spans])
    arrays = [np.concatenate(parts, axis=1), *parts[1:-1]]
    guarded = [Guarded(memory, array if split == (i == 0) else np.zeros_like(array)) for i, array in enumerate(arrays)]
    call = ConcatCall(guarded[0].address, width=columns[-1], count=len(widths), element_bytes=element_bytes)
    call.rows, call.split = rows, split
    call.begins[: len(widths) + 1] = columns[1:-1].tolist()
    call.parts[: len(widths)] = [None if i == skipped else part.address for i, part in enumerate(guarded[1:])]
    assert kernels.concat(ctypes.byref(call)) is None
    expected = [array.copy() for array in arrays]
    for part in range(-1, len(widths) + 1):  # not written
        if part in (-1, len(widths), skipped):
            if split and part == skipped:
                expected[part + 1][:] = 0
            elif not split:
                expected[0][:, columns[part + 1] * element_bytes : columns[part + 2] * element_bytes] = 0
    for buffer, array in zip(guarded, expected, strict=True):
        actual, intact = buffer.read()
        assert intact
        np.testing.assert_array_equal(actual, array)


@pytest.mark.parametrize("element_bytes", [1, 2, 4, 8])
def test_ragged_parts(kernels: ctypes.CDLL, element_bytes: int) -> None:
    """One part to five and as many as a launch takes, of odd widths, of one element and of none."""
    ragged = [[7], [5, 1], [1, 12, 3], [3, 0, 9, 1], [13, 1, 4, 2, 8], [*range(1, MAX_PARTS + 1)]]
    for index, widths in enumerate(ragged):
        even, middle = index % 2 == 0, len(widths) // 2
        check_concat(kernels, widths, rows=3 + index, element_bytes=element_bytes, split=even)
        check_concat(kernels, widths, rows=2, element_bytes=element_bytes, split=not even, skipped=middle)


@pytest.mark.parametrize(("element_bytes", "split"), [(1, False), (2, True), (4, True), (8, False)])
def test_four_elements_per_thread(kernels: ctypes.CDLL, element_bytes: int, split: bool) -> None:
    """Accesses of one element, since a width is odd, or of 16 bytes; the last block of threads is partial."""
    combined = 16 // element_bytes if element_bytes > 2 else 1
    widths = [combined * pieces for pieces in (5, 1, 13, 12)]
    rows = MANY // 31 + 1
    check_concat(kernels, widths, rows=rows, element_bytes=element_bytes, split=split, margin=combined)


@pytest.mark.parametrize("size", [7, 512, 513, 1300])
def test_long_reductions(kernels: ctypes.CDLL, size: int) -> None:
    """One thread per output up to 512 inputs, one block beyond; NaN stays in its column."""
    x = np.random.default_rng(size).normal(size=(2, size, 3)).astype(np.float32)
    x[1, size // 2, 2] = np.nan
    for dtype, (kind, bound) in enumerate([(np.float32, 1e-6), (np.float16, 1e-3), (ml_dtypes.bfloat16, 1e-2)]):
        inputs = x.astype(kind)
        for op, function in enumerate([np.max, np.mean, np.min, np.sum]):
            source, y = Guarded(HostMemory(), inputs), Guarded(HostMemory(), np.zeros((2, 3), kind))
            assert kernels.reduce(op, dtype, source.address, y.address, 2, size, 3) is None
            actual, intact = y.read()
            assert intact
            expected = function(inputs.astype(np.float64), axis=1)
            np.testing.assert_allclose(actual.astype(np.float64), expected, rtol=bound, atol=bound * np.sqrt(size) / 8)
