"""The GPU kernels without a GPU: emulated on the host for each wave size, and compiled for every architecture."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path

import numpy as np
import pytest
from emulation import ROOT, compile_object, gpu_sources, link, load_blas_lt

from custom_ops import GPU_OPERATORS
from custom_ops.check.candidates import check_case
from custom_ops.check.memory import Guarded, HostMemory
from custom_ops.libraries import GpuLibrary
from custom_ops.operator_spec import CustomOperator, OperatorCase, generate_inputs, load

ALL = [load(folder) for folder in GPU_OPERATORS]
OPS = [operator for operator in ALL if operator.folder != "multi_head_attention"]  # has a test of its own

# Waves of 64 lanes and of 32; the kernels here differ in nothing else between AMD's architectures.
DEVICES = {"cdna": "cdna", "cuda": "nvidia"}
# Elements of the largest input that is emulated: the emulator switches fibers at every barrier.
LARGEST = 50_000


@pytest.fixture(scope="module")
def emulations(run_folder: Path) -> dict[str, GpuLibrary]:
    """The GPU library for each device, its lanes run by tests/gpu_emulator on the host."""
    load_blas_lt(run_folder)
    jobs = [(source, device) for device in DEVICES.values() for source in gpu_sources()]
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(lambda job: compile_object(job[0], job[1], run_folder), jobs))
    return {
        name: GpuLibrary(
            link(
                [built for built, job in zip(objects, jobs, strict=True) if job[1] == device],
                run_folder / f"{device}.so",
            )
        )
        for name, device in DEVICES.items()
    }


def small(operator: CustomOperator) -> list[OperatorCase]:
    return [case for case in operator.cases if not case.benchmark and prod(case.inputs[operator.inputs[0]]) <= LARGEST]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("operator", OPS, ids=lambda operator: operator.name)
def test_every_candidate_agrees_with_numpy(
    operator: CustomOperator, device: str, emulations: dict[str, GpuLibrary]
) -> None:
    """Also that nothing but the outputs is written, and that every element of them is.

    Emulation is slow: a case runs in one of its types, another on each device, and its neighbors in the others.
    """
    turn = list(DEVICES).index(device)
    outcomes = [
        outcome
        for number, case in enumerate(small(operator))
        for outcome in check_case(
            emulations[device], HostMemory(), operator, case, case.dtypes[(number + turn) % len(case.dtypes)]
        )
    ]
    assert [outcome for outcome in outcomes if outcome.failure] == []
    candidates = set(emulations[device].candidates(GPU_OPERATORS.index(operator.folder)))
    # the stand-in has two algorithms
    not_proposed = {f"{by}blas_lt_{number}" for number in range(2, 12) for by in ("", "winograd_")}
    not_proposed |= {name for name in candidates if name.startswith("cudnn_")}  # which has none
    assert {outcome.candidate for outcome in outcomes} == candidates - not_proposed


@pytest.mark.parametrize("operator", OPS, ids=lambda operator: operator.name)
def test_misaligned_buffers(operator: CustomOperator, emulations: dict[str, GpuLibrary]) -> None:
    """One element off 16-byte alignment: wide accesses must be refused, the default must still work."""
    firsts = ((case, case.inputs[operator.inputs[0]]) for case in operator.cases)
    case = next(case for case, shape in firsts if prod(shape) > 0 and shape[-1] % 8 == 0)
    for dtype in case.dtypes:
        outcomes = list(check_case(emulations["cuda"], HostMemory(), operator, case, dtype, shift=1))
        assert outcomes
        assert [outcome for outcome in outcomes if outcome.failure] == []


@pytest.mark.parametrize("operator", [load("group_norm"), load("skip_group_norm")], ids=lambda operator: operator.name)
def test_norms_written_over_their_input(operator: CustomOperator, emulations: dict[str, GpuLibrary]) -> None:
    """As our provider has them write where nobody else reads X."""
    for number, case in enumerate(small(operator)[::11]):
        device = list(DEVICES)[number % 2]
        outcomes = list(check_case(emulations[device], HostMemory(), operator, case, case.dtypes[0], alias_output=True))
        assert [outcome for outcome in outcomes if outcome.failure] == []


@pytest.mark.parametrize("device", DEVICES)
def test_products_in_several_streams(device: str, emulations: dict[str, GpuLibrary]) -> None:
    """hipBLASLt's handles have one buffer each that products add up in: a handle multiplies in one stream."""
    operator, library, memory = load("linear_add"), emulations[device], HostMemory()
    case = small(operator)[0]
    arrays = generate_inputs(operator, case, "float16")
    shapes = operator.output_shapes(case)
    outputs = {name: np.zeros(shape, np.float16) for name, shape in shapes.items()}
    guarded = {name: Guarded(memory, array) for name, array in (arrays | outputs).items()}
    params = operator.params(case, "float16", {name: value.address for name, value in guarded.items()})
    number = library.operator(operator.name, params)
    candidate = library.candidates(number).index("blas_lt_1")
    assert library.is_supported(number, candidate, params)
    workspace = Guarded(memory, np.zeros(library.workspace_bytes(number, candidate, params), np.uint8))
    for stream in (16, 32, 16):
        library.run(number, candidate, params, workspace.address, stream)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("device", DEVICES)
def test_attention_of_wide_heads_by_products(device: str, dtype: str, emulations: dict[str, GpuLibrary]) -> None:
    """Products of a BLAS library with our softmax between, where it takes them: no mask, keys a multiple of 8."""
    operator = load("multi_head_attention")
    count = 0
    for case in operator.cases:
        if case.benchmark or case.inputs["query"][-1] < 168:
            continue
        outcomes = list(check_case(emulations[device], HostMemory(), operator, case, dtype))
        assert [outcome for outcome in outcomes if outcome.failure] == []
        count += sum(outcome.candidate in ("gemm", "gemm_in_cache") for outcome in outcomes)
    assert count == 10


COPY = """
#include <algorithm>
#include <chrono>
#include <thread>

#include "common/tuner.h"
using namespace sd_ort;

struct CopyParams {
  const float* x;
  float* y;
  std::string signature() const { return "1024"; }
  std::vector<Output> outputs() const { return {{y, 1024, DType::kFloat32}}; }
};

Candidate<CopyParams> copy(const char* name, int times, float scale, const char* error) {
  const auto run = [=](const CopyParams& p, void*, void*) {
    for (int i = 0; i < 1024 * times; ++i) const_cast<volatile float&>(p.y[i % 1024]) = p.x[i % 1024] * scale;
    return error;
  };
  return {name, [](const CopyParams&) { return true; }, run};
}

extern "C" const char* tune(const float* x, float* y) {
  static const TunableOp<CopyParams> op(
      "Copy",
      {copy("generic", 1000, 1, nullptr), copy("right", 100, 1, nullptr), copy("wrong", 1, 2, nullptr),
       copy("slow_and_wrong", 1000, 2, nullptr), copy("failing", 1, 1, "no memory")},
      [](const CopyParams&) { return "wrong"; });
  static std::string line;
  const CopyParams params{x, y};
  line = Tuner::instance().tune(op, &params, nullptr);
  if (line.empty()) line = Tuner::instance().results();
  return line.c_str();
}

// The runs of a generic candidate that takes 100 ms, in the tuning of a call whose default is fast.
extern "C" int runs_of_a_slow_reference(const float* x, float* y) {
  static int runs = 0;
  Candidate<CopyParams> generic = copy("generic", 1, 1, nullptr);
  generic.run = [run = generic.run](const CopyParams& p, void* workspace, void* stream) {
    ++runs;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    return run(p, workspace, stream);
  };
  static const TunableOp<CopyParams> op("SlowCopy", {generic, copy("right", 1, 1, nullptr)},
                                        [](const CopyParams&) { return "right"; });
  const CopyParams params{x, y};
  return Tuner::instance().tune(op, &params, nullptr).empty() ? runs : -1;
}

struct FillParams {
  float* y;
  size_t count, first, end;  // the wrong candidate does not write elements `first` to `end`
  std::string signature() const { return std::to_string(first); }
  std::vector<Output> outputs() const { return {{y, count, DType::kFloat32}}; }
};

// Results of tuning a large output whose faster candidate leaves a range out.
extern "C" const char* tune_with_a_hole(float* y, size_t count, size_t first, size_t end) {
  const auto fill = [](const char* name, int times, bool hole) {
    const auto run = [=](const FillParams& p, void*, void*) -> const char* {
      for (int i = 0; i < times; ++i) {
        std::fill(p.y, p.y + (hole ? p.first : p.count), 1.f);
        if (hole) std::fill(p.y + p.end, p.y + p.count, 1.f);
      }
      return nullptr;
    };
    return Candidate<FillParams>{name, [](const FillParams&) { return true; }, run};
  };
  static const TunableOp<FillParams> op("Fill", {fill("generic", 10, false), fill("hole", 1, true)});
  static std::string line;
  const FillParams params{y, count, first, end};
  Tuner::instance().clear();
  line = Tuner::instance().tune(op, &params, nullptr);
  if (line.empty()) line = Tuner::instance().results();
  return line.c_str();
}
"""


@pytest.fixture
def copies(run_folder: Path, tmp_path: Path) -> ctypes.CDLL:
    source = tmp_path / "copy.cc"
    source.write_text(COPY)
    tuner = compile_object(ROOT / "custom_ops/common/tuner.cc", "nvidia", run_folder)
    return ctypes.CDLL(str(link([compile_object(source, "nvidia", tmp_path), tuner], tmp_path / "copy.so")))


def test_tuner_runs_a_slow_reference_once(copies: ctypes.CDLL) -> None:
    x, y = np.arange(1, 1025, dtype=np.float32), np.zeros(1024, np.float32)
    assert copies.runs_of_a_slow_reference(*(array.ctypes.data_as(ctypes.c_void_p) for array in (x, y))) == 1


def test_tuner_names_faster_candidates_that_it_rejects(copies: ctypes.CDLL) -> None:
    """Also the default; one that is wrong and slower than the choice would not be missed."""
    copies.tune.restype = ctypes.c_char_p
    x, y = np.arange(1, 1025, dtype=np.float32), np.zeros(1024, np.float32)
    line = copies.tune(*(array.ctypes.data_as(ctypes.c_void_p) for array in (x, y))).decode().rstrip("\n")
    operator, signature, candidate, own, default, rejected = line.split("\t")
    assert (operator, signature, candidate) == ("Copy", "1024", "right")
    assert float(default) < float(own)
    assert rejected == "wrong: wrong results; failing: no memory"


@pytest.mark.parametrize(
    ("first", "end", "expected"),
    [(4_000_000, 4_010_000, "hole: wrong results"), (-9, 0, "hole: wrong results"), (7, 7, "")],
)
def test_tuner_finds_holes_in_large_outputs(copies: ctypes.CDLL, first: int, end: int, expected: str) -> None:
    """The samples of a large output find a range that a candidate does not write, in the middle or at the end."""
    copies.tune_with_a_hole.restype = ctypes.c_char_p
    y = np.zeros(9_000_123, np.float32)
    sizes = (ctypes.c_size_t(size) for size in (y.size, first % y.size, end % y.size or y.size))
    line = copies.tune_with_a_hole(y.ctypes.data_as(ctypes.c_void_p), *sizes).decode().rstrip("\n")
    assert line.split("\t")[5] == expected


def test_tuner_keeps_a_candidate_that_agrees(emulations: dict[str, GpuLibrary]) -> None:
    """Measures a call, then chooses what it measured; set_tuning_result takes known names only."""
    library = emulations["cdna"]
    operator = OPS[0]
    case = next(case for case in operator.cases if case.inputs["X"] == (1, 77, 24))  # of few elements: all run 24 times
    arrays = {name: Guarded(HostMemory(), array) for name, array in generate_inputs(operator, case, "float16").items()}
    y = Guarded(HostMemory(), np.zeros(case.inputs["X"], np.float16))
    address = {name: guarded.address for name, guarded in arrays.items()} | {"Y": y.address}
    params = operator.params(case, "float16", address)
    number = library.operator(operator.name, params)
    library.tune(number, params)
    (result,) = library.tuning_results()
    assert result[:2] == ["GroupNorm", "float16_1x77x24_g8"]
    assert result[2] in library.candidates(number)
    assert result[5] == ""
    chosen = library.choose(number, params)
    assert library.candidates(number)[chosen] == result[2]
    assert library.c.sd_ort_set_tuning_result(b"GroupNorm", result[1].encode(), b"two_pass") == 1
    assert library.candidates(number)[library.choose(number, params)] == "two_pass"
    assert library.c.sd_ort_set_tuning_result(b"GroupNorm", result[1].encode(), b"no_such") == 0
    library.c.sd_ort_clear_tuning_results()
    default = library.default_candidate(number, params)
    assert library.choose(number, params) == default
    assert library.candidates(number)[default] != "generic"


@pytest.mark.parametrize("operator", ALL, ids=lambda operator: operator.name)
def test_candidate_0_takes_every_call_and_the_default_its_own(
    operator: CustomOperator, emulations: dict[str, GpuLibrary]
) -> None:
    """The tuner holds all candidates to candidate 0; the default supports what it is chosen for."""
    library = emulations["cuda"]
    number, defaults = GPU_OPERATORS.index(operator.folder), set()
    for case in operator.cases:
        for dtype in case.dtypes:
            names = (*case.inputs, *operator.output_shapes(case))
            params = operator.params(case, dtype, dict.fromkeys(names, 1 << 20))
            default = library.default_candidate(number, params)
            assert library.is_supported(number, 0, params)
            assert library.is_supported(number, default, params)
            defaults.add(default)
    assert defaults - {0} or len(library.candidates(number)) == 1
    assert library.candidates(number)[0] in ("generic", "two_pass")


def test_transformed_filters_are_used_untuned(emulations: dict[str, GpuLibrary]) -> None:
    operator, library = load("nhwc_conv"), emulations["cuda"]
    number = GPU_OPERATORS.index("nhwc_conv")
    for case in operator.cases:
        if min((*case.inputs["X"], *case.inputs["W"])) > 0:
            params = operator.params(case, "float16", dict.fromkeys((*case.inputs, "Y"), 1 << 20))
            default = library.candidates(number)[library.default_candidate(number, params)]
            assert default.startswith("winograd_") == ("transformed_filters" in case.inputs), case.name
