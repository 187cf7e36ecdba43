"""MultiHeadAttention's GPU kernels without a GPU: each architecture's lanes are emulated on the host.

The emulator (tests/gpu_emulator) runs the kernels' own source; its matrix instructions are written from the vendors'
tables of which lane holds which element, apart from common/mma.h, so a wrong fragment layout gives wrong numbers here.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from emulation import DEVICES, ROOT, compile_object, link

from custom_ops.check.memory import Guarded, HostMemory
from custom_ops.operator_spec import DTYPES, Array, OperatorCase, generate_inputs, load, nmse, nmse_limit, output_dtype
from custom_ops.operators.multi_head_attention.cases import reference

OPERATOR = load("multi_head_attention")
CASES = [case for case in OPERATOR.cases if not case.benchmark]
# What has nothing to do with products is the same on RDNA2 as on RDNA3.
without_rdna2 = pytest.mark.parametrize(
    "library", [device for device in DEVICES if device != "rdna2"], indirect=True, scope="module"
)
# enum MultiHeadAttentionKernel
KERNELS = {
    "large_tiles": 0, "small_tiles": 1, "short_keys": 2, "generic": 3, "warpgroup": 4, "two_warpgroups": 5,
    "short_warpgroup": 6, "full_tiles": 7, "pingpong_warpgroups": 8,
}  # fmt: skip
SOURCE = """
#include "operators/multi_head_attention/op.h"
using namespace sd_ort;
extern "C" int is_supported(const MultiHeadAttentionParams* params, int kernel) {
  return multi_head_attention_supports(*params, static_cast<MultiHeadAttentionKernel>(kernel));
}
extern "C" const char* run(const MultiHeadAttentionParams* params, int kernel) {
  return multi_head_attention_launch(*params, static_cast<MultiHeadAttentionKernel>(kernel), nullptr);
}
"""


def compile_text(folder: Path, text: str, device: str) -> Path:
    """Object file of C++ that a test brings along."""
    source = folder / "text.cc"
    source.write_text(text)
    return compile_object(source, device, folder)


@pytest.fixture(scope="module", params=DEVICES)
def library(request: pytest.FixtureRequest, run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    own = tmp_path_factory.mktemp(request.param)
    folder = ROOT / "custom_ops/operators/multi_head_attention"
    sources = [*folder.glob("kernels/*.hip"), folder / "launch_config.cc"]
    objects = [compile_object(source, request.param, run_folder) for source in sources]
    loaded = ctypes.CDLL(str(link([*objects, compile_text(own, SOURCE, request.param)], own / "attention.so")))
    loaded.run.restype = ctypes.c_char_p
    return loaded


@pytest.fixture
def types(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Of matrix kernels: a case that is emulated in one on this device is in the other on the next."""
    turn = list(DEVICES).index(request.node.callspec.params["library"]) % 2
    return ("bfloat16", "float16") if turn else ("float16", "bfloat16")


def emulate(library: ctypes.CDLL, case: OperatorCase, dtype: str, kernel: str, shift: int = 0) -> float | None:
    """NMSE against NumPy, None when the kernel refuses the call; `shift` elements off alignment."""
    arrays = generate_inputs(OPERATOR, case, dtype)
    result = attend(library, case, dtype, kernel, arrays, shift)
    return None if result is None else nmse(result, reference(arrays, case.attributes)[requested(case)])


def requested(case: OperatorCase) -> str:
    """The output that a case is compared by: the one in float8 if there is one."""
    return list(OPERATOR.output_shapes(case))[-1]


def attend(
    library: ctypes.CDLL, case: OperatorCase, dtype: str, kernel: str, arrays: dict[str, Array], shift: int = 0
) -> Array | None:
    """The requested output for inputs `arrays`, None when the kernel refuses the call."""
    memory, itemsize = HostMemory(), DTYPES[dtype][1].itemsize
    inputs = {name: Guarded(memory, array, shift * itemsize) for name, array in arrays.items()}
    outputs = {
        name: Guarded(memory, np.full(shape, np.nan, output_dtype(name, dtype)), shift * itemsize)
        for name, shape in OPERATOR.output_shapes(case).items()
    }
    address = {name: guarded.address for name, guarded in (inputs | outputs).items()}
    params = OPERATOR.params(case, dtype, address)
    if not library.is_supported(ctypes.byref(params), KERNELS[kernel]):
        return None
    error = library.run(ctypes.byref(params), KERNELS[kernel])
    assert error is None, error
    result, in_bounds = outputs[requested(case)].read()
    assert in_bounds, "wrote out of bounds"
    return result


def check(library: ctypes.CDLL, kernel: str, *dtypes: str) -> int:
    """Emulates every case that the kernel takes, in one of the types, its neighbors in the others; how many those
    were."""
    typed = [(case, dtypes[number % len(dtypes)]) for number, case in enumerate(CASES)]
    errors = {case.name: emulate(library, case, dtype, kernel) for case, dtype in typed}
    computed = {name: error for name, error in errors.items() if error is not None}
    limits = {case.name: nmse_limit(case, dtype, requested(case)) for case, dtype in typed}
    assert {name: error for name, error in computed.items() if not error < limits[name]} == {}
    return len(computed)


@pytest.mark.parametrize("kernel", ["large_tiles", "small_tiles", "short_keys"])
def test_matrix_kernels_agree_with_numpy(library: ctypes.CDLL, kernel: str, types: tuple[str, str]) -> None:
    assert check(library, kernel, *types) >= {"large_tiles": 25, "small_tiles": 20, "short_keys": 15}[kernel]


@without_rdna2
@pytest.mark.parametrize("kernel", list(KERNELS)[4:])
def test_warpgroup_kernels_agree_with_numpy(
    library: ctypes.CDLL, kernel: str, types: tuple[str, str], request: pytest.FixtureRequest
) -> None:
    """NVIDIA's alone: elsewhere they take no call."""
    count = check(library, kernel, *types)
    is_nvidia = "nvidia" in request.node.name
    least = {"short_warpgroup": 10, "full_tiles": 3, "warpgroup": 20, "two_warpgroups": 20}.get(kernel, 9)
    assert count >= least if is_nvidia else count == 0


@without_rdna2
def test_plain_kernel_agrees_with_numpy(library: ctypes.CDLL) -> None:
    assert check(library, "generic", "float32") == len(CASES)


@without_rdna2
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_misaligned_buffers_take_the_plain_kernel(library: ctypes.CDLL, dtype: str) -> None:
    case = next(case for case in CASES if case.name.startswith("1x2x77x77x64"))
    assert emulate(library, case, dtype, "large_tiles", shift=1) is None
    assert emulate(library, case, dtype, "small_tiles", shift=1) is None
    error = emulate(library, case, dtype, "generic", shift=1)
    assert error is not None
    assert error < nmse_limit(case, dtype)


@pytest.mark.parametrize("kernel", ["large_tiles", "small_tiles", "generic"])
def test_hidden_rows_are_zero(library: ctypes.CDLL, kernel: str) -> None:
    """-infinity on all keys of a row gives zeros, not NaN."""
    case = next(case for case in CASES if case.name.startswith("1x2x40x90x64-hidden_rows"))
    hidden = generate_inputs(OPERATOR, case, "float16")["attention_bias"]
    rows = np.asarray(np.isneginf(hidden).all(axis=-1))
    assert rows.any()
    expected = reference(generate_inputs(OPERATOR, case, "float16"), case.attributes)["output"]
    assert not expected[0, np.flatnonzero(rows[0, 0])].any()
    error = emulate(library, case, "float16", kernel)
    assert error is not None
    assert error < nmse_limit(case, "float16")


@without_rdna2
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("place", ["query", "key", "value", "attention_bias", "scale"])
def test_nan_stays_nan(library: ctypes.CDLL, kernel: str, place: str) -> None:
    """Where arithmetic makes NaN of one, there and nowhere else; rows with a mask and without, a negative scale."""
    name = "2x2x33x70x40-bias21" if place == "attention_bias" else "2x2x64x77x40-kv" if place == "value" else ""
    case = next(case for case in CASES if case.name.startswith(name or "2x2x33x70x40-bias21"))
    dtype = "float32" if kernel == "generic" else "bfloat16"
    arrays = generate_inputs(OPERATOR, case, dtype)
    if place == "value":
        arrays["key"][0, 5, 1, 1, 7] = np.nan  # packed: the values' part
    elif place == "scale":
        case = replace(case, attributes=case.attributes | {"scale": float("nan")})
    else:
        arrays[place].reshape(-1)[arrays[place].size // 3] = np.nan
    result = attend(library, case, dtype, kernel, arrays)
    if result is None:
        assert (kernel == "short_keys" and "x70" not in case.name) or "warpgroup" in kernel or kernel == "full_tiles"
        return
    expected = np.isnan(reference(arrays, case.attributes)["output"])
    assert expected.any()
    assert place == "scale" or not expected.all()
    assert (np.isnan(result) == expected).all()


LAYOUTS = """
#include "common/mma.h"
using namespace sd_ort;
extern "C" int lanes() { return mma::kWave; }
extern "C" int operand_size() { return mma::kOperandSize; }
extern "C" int accumulator_size() { return mma::kAccumulatorSize; }
extern "C" int operand_at(int lane, int i) { return mma::operand_row(lane, i) * 16 + mma::operand_depth(lane, i); }
extern "C" int accumulator_at(int lane, int i) {
  return mma::accumulator_row(lane, i) * 16 + mma::accumulator_column(lane, i);
}
"""


@pytest.mark.parametrize("arch", DEVICES)
def test_fragments_cover_the_tile(arch: str, tmp_path: Path) -> None:
    """Every element of a tile is in the wave: once, and on RDNA2 and RDNA3 twice in operands."""
    library = ctypes.CDLL(str(link([compile_text(tmp_path, LAYOUTS, arch)], tmp_path / "layouts.so")))

    def tile_elements(size: int, at: Callable[[int, int], int]) -> list[int]:
        return sorted(at(lane, i) for lane in range(library.lanes()) for i in range(size))

    copies = 2 if arch in ("rdna2", "rdna3") else 1
    assert tile_elements(library.operand_size(), library.operand_at) == sorted([*range(256)] * copies)
    assert tile_elements(library.accumulator_size(), library.accumulator_at) == [*range(256)]


FAULTS = """
#include "common/gpu.h"
#include "common/mma.h"
using namespace sd_ort;
__global__ void diverge(float* x) {
  if (threadIdx.x % 2 == 0) x[0] = shuffle_xor(x[0], 1);
  __syncthreads();
}
__global__ void read_unwritten(float* x) {
  __shared__ float lds[64];
  x[threadIdx.x] = lds[threadIdx.x];
}
extern "C" void run(int which, float* x) {
  launch(which == 0 ? diverge : read_unwritten, dim3(1), dim3(64), 0, nullptr, x);
}
"""


def test_emulator_finds_faults(tmp_path: Path) -> None:
    """A lane that never comes ends the process; shared memory that nothing wrote reads as NaN."""
    path = link([compile_text(tmp_path, FAULTS, "rdna3")], tmp_path / "faults.so")
    script = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).run(0, (ctypes.c_float * 64)())"
    python = subprocess.run(["python3", "-c", script, str(path)], capture_output=True, text=True, check=False)
    assert python.returncode != 0
    assert "emulator: deadlock" in python.stderr or "emulator: lanes diverge" in python.stderr
    values = np.zeros(64, np.float32)
    ctypes.CDLL(str(path)).run(1, values.ctypes.data_as(ctypes.c_void_p))
    assert np.isnan(values).all()
