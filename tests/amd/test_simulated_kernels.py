"""Kernels on the simulated HIP runtime: their machine code runs in tinygrad's emulator."""

from __future__ import annotations

import ctypes
import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hip_client import RELAXED, Hip
from hip_library import hip_library
from simulation import ROOT, run_client, simulate

from sd_ort.runtime import build

pytestmark = pytest.mark.usefixtures("tinygrad")
TARGETS = ("gfx942", "gfx1100", "gfx1201")


def run_kernels(hip: Hip, image: str) -> list:
    """Results of kernels.c."""
    add, reverse = hip.function(image, "add"), hip.function(image, "reverse")
    count, add_atomically = hip.function(image, "count_in_halves"), hip.function(image, "add_atomically")
    x = hip.upload((ctypes.c_float * 300)(*range(300)))
    stream = hip.create("hipStreamCreate")
    hip.hipStreamBeginCapture(stream, RELAXED)
    value = ctypes.c_float(0.5)
    statuses = [hip.launch(add, (3, 1, 1), (100, 1, 1), x, value, ctypes.c_uint(299), stream=stream)]
    value.value = 100  # the graph has a copy
    graph = ctypes.c_void_p()
    hip.hipStreamEndCapture(stream, ctypes.byref(graph))
    executable = hip.create("hipGraphInstantiateWithFlags", graph, ctypes.c_ulonglong(0))
    statuses += [hip.hipGraphLaunch(executable, stream) for _ in range(2)]
    sums = hip.download(x, (ctypes.c_float * 300)())
    y = hip.upload((ctypes.c_uint * 512)(*range(512)))
    statuses.append(hip.launch(reverse, (2, 1, 1), (256, 1, 1), y))
    halves, total = hip.upload((ctypes.c_ushort * 4)()), hip.upload((ctypes.c_uint * 1)())
    statuses.append(hip.launch(count, (4, 1, 1), (1, 1, 1), halves, ctypes.c_uint(50000)))
    statuses.append(hip.launch(add_atomically, (64, 1, 1), (64, 1, 1), total))
    return [
        statuses,
        sums,
        hip.download(y, (ctypes.c_uint * 512)()),
        hip.download(halves, (ctypes.c_ushort * 4)()),
        hip.download(total, (ctypes.c_uint * 1)()),
    ]


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compute(target: str, code_object: Callable[..., Path]) -> None:
    """Hidden arguments, partial waves, barriers, LDS; and several host threads at neighboring halves of a word."""
    statuses, sums, reversed_, halves, total = run_client(run_kernels, target, code_object(target))
    assert set(statuses) == {"hipSuccess"}
    assert sums == [*(value + 1 for value in range(299)), 299]
    assert reversed_ == [*range(255, -1, -1), *range(511, 255, -1)]
    assert halves == [50000] * 4
    assert total == [4096]


def run_64_bits(hip: Hip, image: str, *values: str) -> list:
    """Results of compute_64_bits."""
    x = hip.upload((ctypes.c_ulonglong * 2)(*map(int, values)))
    results = hip.upload((ctypes.c_ulonglong * 9)())
    hip.launch(hip.function(image, "compute_64_bits"), (1, 1, 1), (1, 1, 1), results, x)
    return hip.download(results, (ctypes.c_ulonglong * 9)())


def test_operands_of_64_bits(code_object: Callable[..., Path]) -> None:
    """Addresses of gfx942: both halves of each operand, also where the result overwrites one."""
    x, y = 0x923456789ABCDEF1, 0x7F12345689ABCDE3
    results = run_client(run_64_bits, "gfx942", code_object("gfx942"), x, y)
    expected = [x, 2 * x + y, 2 * x + y, 8 * x + y, (x - 2**64) >> 29, 8 * x, (y % 2**32) * 5 + x, y, x]
    assert [f"{value:016x}" for value in results] == [f"{value % 2**64:016x}" for value in expected]


def run_loads_of_halves(hip: Hip, image: str) -> list:
    """Results of load_halves for the bytes 0 to 32."""
    out, values = hip.upload((ctypes.c_uint * 32)()), hip.upload((ctypes.c_ubyte * 33)(*range(33)))
    hip.launch(hip.function(image, "load_halves"), (1, 1, 1), (32, 1, 1), out, values)
    return hip.download(out, (ctypes.c_uint * 32)())


@pytest.mark.parametrize("target", ["gfx942", "gfx1100"])
def test_halves_at_odd_addresses(target: str, code_object: Callable[..., Path]) -> None:
    """The products in 8 bits load pairs of rows with an odd number of columns."""
    values = run_client(run_loads_of_halves, target, code_object(target))
    assert values == [byte + 256 * (byte + 1) for byte in range(32)]


def run_loads_to_halves(hip: Hip, image: str) -> list:
    """Results of load_to_halves for 32 words and registers of 0x12345678."""
    words = hip.upload((ctypes.c_uint * 32)(*(0x89ABCDEF + 0x01010101 * lane for lane in range(32))))
    out = hip.upload((ctypes.c_uint * 128)(*[0x12345678] * 128))
    hip.launch(hip.function(image, "load_to_halves"), (1, 1, 1), (32, 1, 1), out, words)
    return hip.download(out, (ctypes.c_uint * 128)())


@pytest.mark.parametrize("target", TARGETS)
def test_loads_to_a_half_keep_the_other(target: str, code_object: Callable[..., Path]) -> None:
    """clang 22 loads float16 from LDS so, for RDNA3."""
    values = run_client(run_loads_to_halves, target, code_object(target))
    words = [0x89ABCDEF + 0x01010101 * lane for lane in range(32)]
    signed = [(byte ^ 0x80) - 0x80 for byte in (word >> 8 & 0xFF for word in words)]
    assert values[:32] == [0x12340000 | word & 0xFFFF for word in words]
    assert values[32:64] == [word & 0xFFFF0000 | 0x5678 for word in words]
    assert values[64:96] == [(word >> 24) << 16 | 0x5678 for word in words]
    assert values[96:] == [0x12340000 | byte & 0xFFFF for byte in signed]


def run_halves(hip: Hip, image: str) -> list:
    """Results of compute_halves for 0.25."""
    out = hip.upload((ctypes.c_float * 7)())
    hip.launch(hip.function(image, "compute_halves"), (1, 1, 1), (1, 1, 1), out, ctypes.c_ushort(0x3400))
    return hip.download(out, (ctypes.c_float * 7)())


def test_constants_of_halves(code_object: Callable[..., Path]) -> None:
    """1.0 has other bits in 16-bit instructions of gfx942 than in those of 32 bits; v200 is no high half."""
    assert run_client(run_halves, "gfx942", code_object("gfx942")) == [1.25, 0.75, -0.5, 1, 1, 1.25, 0.75]


def run_permutations(hip: Hip, image: str, lanes: str) -> list:
    """Results of permute_lanes in a block of so many threads."""
    out = hip.upload((ctypes.c_int * 320)())
    hip.launch(hip.function(image, "permute_lanes"), (1, 1, 1), (int(lanes), 1, 1), out)
    values = hip.download(out, (ctypes.c_int * 320)())
    return [values[start : start + int(lanes)] for start in range(0, 320, 64)]


@pytest.mark.parametrize(("target", "wave"), [("gfx942", 64), ("gfx1100", 32), ("gfx1201", 32)])
@pytest.mark.parametrize("is_partial", [True, False])
def test_lanes_are_permuted(target: str, wave: int, is_partial: bool, code_object: Callable[..., Path]) -> None:
    """High bits of an address are ignored; those of inactive lanes can be anything; an inactive source gives 0."""
    lanes = wave - 12 if is_partial else wave
    values = list(range(100, 100 + lanes))
    before = 0 if is_partial else values[-1]
    after = 0 if is_partial else values[0]
    pulled, same, pushed, same_pushed, accumulation = run_client(run_permutations, target, code_object(target), lanes)
    assert pulled == accumulation == [*values[1:], after]
    assert same == same_pushed == values
    assert pushed == [before, *values[:-1]]


def run_broadcasts(hip: Hip, image: str) -> list:
    """Results of broadcast_rows."""
    out = hip.upload((ctypes.c_int * 128)())
    hip.launch(hip.function(image, "broadcast_rows"), (1, 1, 1), (64, 1, 1), out)
    return hip.download(out, (ctypes.c_int * 128)())


def test_rows_are_broadcast(code_object: Callable[..., Path]) -> None:
    """DPP of gfx9: the last lane of a row goes to the next row, lane 31 to rows 2 and 3."""
    values = run_client(run_broadcasts, "gfx942", code_object("gfx942"))
    assert values == [max(16 * row - 1, -1) for row in range(4) for _ in range(16)] + [-1] * 32 + [31] * 32


def run_float8(hip: Hip, image: str, wave: str, one: str) -> list:
    """Results of multiply_float8 for all 256 numbers and the identity matrix."""
    out = hip.upload((ctypes.c_float * 256)())
    identity = [int(one) * (i % 17 == 0) for i in range(256)]
    numbers, ones = (hip.upload((ctypes.c_ubyte * 256)(*values)) for values in (range(256), identity))
    hip.launch(hip.function(image, "multiply_float8"), (1, 1, 1), (int(wave), 1, 1), out, numbers, ones)
    return hip.download(out, (ctypes.c_float * 256)())


@pytest.mark.parametrize(
    ("target", "wave", "format_"),
    [("gfx942", 64, ml_dtypes.float8_e4m3fnuz), ("gfx1201", 32, ml_dtypes.float8_e4m3fn)],
)
def test_float8_numbers(target: str, wave: int, format_: type, code_object: Callable[..., Path]) -> None:
    """Each GPU's format. A row of 16 with a NaN is NaN, since it is times 0 too."""
    one = int(np.ones((), format_).view(np.uint8))
    values = run_client(run_float8, target, code_object(target), wave, one)
    numbers = np.arange(256, dtype=np.uint8).view(format_).astype(np.float32).reshape(16, 16)
    numbers[np.isnan(numbers).any(1)] = np.nan
    assert np.array_equal(np.array(values).reshape(16, 16), numbers, equal_nan=True)


def run_shared_rows(hip: Hip, image: str) -> list:
    """Results of share_rows for (lane, 0.5) as halves and lane as floats, added to 1."""
    out = hip.upload((ctypes.c_float * 64)(*[1] * 64))
    halves = b"".join(struct.pack("<ee", lane, 0.5) for lane in range(32))
    words = hip.upload((ctypes.c_uint * 32)(*struct.unpack("<32I", halves)))
    floats = hip.upload((ctypes.c_float * 32)(*range(32)))
    hip.launch(hip.function(image, "share_rows"), (1, 1, 1), (32, 1, 1), out, words, floats)
    return hip.download(out, (ctypes.c_float * 64)())


def test_a_lane_is_shared_with_its_row(code_object: Callable[..., Path]) -> None:
    """row_share of RDNA, which the matrix multiplications of RDNA2 use; gfx1100 has it too."""
    values = run_client(run_shared_rows, "gfx1100", code_object("gfx1100"))
    products = [lane * (lane // 16 * 16 + 5) for lane in range(32)]
    assert values == [*(1.25 + product for product in products), *(1 + product for product in products)]


def run_products(hip: Hip, image: str, dtype: str) -> list:
    """Results of products.hip for `small_integers`."""
    kernel, to_bits = {
        "float16": ("multiply_halves", lambda value: struct.unpack("<H", struct.pack("<e", value))[0]),
        "bfloat16": ("multiply_bfloat16", lambda value: struct.unpack("<I", struct.pack("<f", value))[0] >> 16),
    }[dtype]
    operands = hip.upload((ctypes.c_ushort * 768)(*map(to_bits, small_integers())))
    results, stored = hip.upload((ctypes.c_float * 784)()), hip.upload((ctypes.c_ushort * 256)())
    hip.launch(hip.function(image, kernel), (1, 1, 1), (32, 1, 1), operands, results, stored)
    return [hip.download(results, (ctypes.c_float * 784)()), hip.download(stored, (ctypes.c_ushort * 256)())]


def small_integers() -> list[int]:
    """Three tiles from -3 to 3 whose products are exact in bfloat16."""
    return [(i * i + 5 * i + i // 7) % 7 - 3 for i in range(768)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dot_products(dtype: str, tmp_path: Path) -> None:
    """The products that RDNA2 has in place of matrix instructions, as machine code of gfx1100."""
    compiler = build.find_hip_compiler()
    flags = ["-x", "hip", "--offload-arch=gfx1100", "--cuda-device-only", "--no-gpu-bundle-output", "-std=c++17", "-O3"]
    flags += ["-D__HIP_PLATFORM_AMD__", "-DSD_ORT_DOT_PRODUCTS", f"-I{ROOT / 'custom_ops'}", "-c"]
    source, image = str(Path(__file__).with_name("products.hip")), tmp_path / "products.co"
    subprocess.run([compiler.path, *compiler.flags, *flags, source, "-o", str(image)], check=True)
    results, stored = run_client(run_products, "gfx1100", image, dtype)
    a, b, c = np.array(small_integers(), np.float64).reshape(3, 16, 16)
    product = a @ b.T
    assert abs(product).max() <= 256
    expected = [*product.ravel(), *(product @ c.T).ravel(), *(product @ c.T).ravel(), *product.max(axis=1)]
    assert results == expected
    bits = np.array(stored, np.uint16)
    values = bits.view(np.float16) if dtype == "float16" else (bits.astype(np.uint32) << 16).view(np.float32)
    assert (values.reshape(16, 16) == product).all()


@pytest.mark.parametrize(
    ("name", "locked"),
    [
        *(("GLOBAL_STORE_B16", True), ("GLOBAL_STORE_D16_HI_B8", True), ("GLOBAL_STORE_SHORT", True)),
        *(("FLAT_STORE_BYTE", True), ("GLOBAL_ATOMIC_ADD_U32", True), ("GLOBAL_STORE_B32", False)),
        *(("GLOBAL_STORE_DWORDX4", False), ("DS_STORE_B16", False), ("GLOBAL_LOAD_U16", False)),
    ],
)
def test_changes_of_shared_words_take_a_lock(name: str, locked: bool) -> None:
    """Host threads of two blocks would lose each other's halves: rarely, as the test above may not notice."""
    sys.path.insert(0, str(ROOT / "scripts/amd/simulated_rocm/emulator"))
    from tinygrad_emulator import needs_lock

    assert needs_lock(name) == locked


def read_behind_an_allocation(hip: Hip, image: str) -> list:
    x = hip.upload((ctypes.c_float * 64)())
    hip.launch(hip.function(image, "add"), (2, 1, 1), (64, 1, 1), x, ctypes.c_float(1), ctypes.c_uint(128))
    return []


def test_a_kernel_out_of_bounds_ends_the_process(code_object: Callable[..., Path]) -> None:
    with pytest.raises(AssertionError, match=r"simulated HIP: memory access fault at 0x[0-9a-f]+ by kernel add"):
        run_client(read_behind_an_allocation, "gfx1100", code_object("gfx1100"))


OPERATORS = ("bias_add", "nhwc_conv", "linear_add")


@pytest.mark.parametrize("target", ["gfx942", "gfx1100"])
def test_every_candidate_of_three_operators(target: str, tmp_path: Path) -> None:
    """scripts/checks/check_ops_gpu.py as on a GPU. Matrix instructions of the second one keep subnormal halves."""
    check = [str(ROOT / "scripts/checks/check_ops_gpu.py"), "--arch", target, "--library", str(hip_library())]
    check += ["--limit", "20000"]
    report = tmp_path / "report.json"
    options = ("--only-hip", "--report", str(report))
    result = simulate(target, [sys.executable, *check, "--operators", *OPERATORS], *options)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(" 0 faults") == 3
    (products,) = (line for line in result.stdout.splitlines() if line.startswith("LinearAdd "))
    assert " 2 candidates" in products  # without hipBLASLt: generic and tiles
    assert json.loads(report.read_text())["total"]["launches"] > 50
