"""The GPU library compiled for every architecture: registers, spills and machine code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from cli_type import Cli
from hip_library import HIP_WHEEL, TARGETS, copying_compiler
from hip_library import hip_library as build_hip_library

from custom_ops import code_objects
from custom_ops.amd_targets import GENERIC
from custom_ops.code_objects import Kernel
from custom_ops.rocm import llvm_tool
from sd_ort.core.cache import cache_folder
from sd_ort.runtime import build, headers, library
from sd_ort.runtime.ort_wheel import needed_libraries, search_folders

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def hip_library() -> Path:
    """libsd_ort_hip.so, with the provider's library beside it."""
    return build_hip_library()


@pytest.fixture(scope="module")
def kernels(hip_library: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    folder = tmp_path_factory.mktemp("code_objects")
    if not HIP_WHEEL:
        return code_objects.read_kernels(code_objects.extract(hip_library, folder))
    provider = hip_library.with_name(library.PROVIDER_LIBRARIES["hip"])  # has the operators' kernels and its own
    operators = kernel_names((ROOT / "results/ops_amd_resources.md").read_text())
    all_kernels = code_objects.read_kernels(code_objects.extract(provider, folder))
    return [kernel for kernel in all_kernels if f"| {kernel.name}" in operators]


def test_no_kernel_spills(kernels: list[Kernel]) -> None:
    """Neither vector nor scalar registers, and no scratch memory."""
    assert [kernel for kernel in kernels if kernel.spills or kernel.scratch_bytes] == []


def test_every_kernel_is_there_for_every_architecture(kernels: list[Kernel]) -> None:
    names = {arch: {kernel.name for kernel in kernels if kernel.target == arch} for arch in TARGETS}
    assert all(names[arch] == names[TARGETS[0]] for arch in TARGETS)
    assert len(names[TARGETS[0]]) > 100


def test_wave_size_comes_from_the_compiler(kernels: list[Kernel]) -> None:
    """The same blocks run in waves of 64 on CDNA and of 32 on RDNA, and are whole waves on both."""
    for kernel in kernels:
        assert kernel.wave_size == (64 if kernel.target.startswith("gfx9") else 32)
        assert kernel.block_size % 64 == 0


def test_no_kernel_has_hidden_arguments(kernels: list[Kernel]) -> None:
    """A kernel that reads the grid's size gets 256 bytes more with each launch."""
    assert [kernel for kernel in kernels if kernel.has_hidden_arguments] == []


def test_kernels_have_the_same_names_on_windows(hip_library: Path) -> None:
    """Host code for Windows finds kernels that were compiled on Linux. int64_t is long here and long long there."""
    provider = hip_library.with_name(library.PROVIDER_LIBRARIES["hip"])
    symbols = sorted(set(re.findall(rb"(_Z\w+)\.kd", provider.read_bytes())))
    demangle = subprocess.run([llvm_tool("llvm-cxxfilt")], input=b"\n".join(symbols), capture_output=True, check=True)
    names = demangle.stdout.decode().splitlines()
    assert sum(name.startswith("void sd_ort::") for name in names) == len(symbols) > 400
    assert not [name for name in names if re.search(r"\blong\b", name.replace("long long", ""))]


def test_lanes_exchange_before_any_is_off(kernels: list[Kernel]) -> None:
    """A lane that is off gives no value: clang 19 moves v_permlanex16 into branches unless it is kept from that."""
    for name, code in [*disassembled(kernels, "gfx10"), *disassembled(kernels, "gfx11")]:
        assert masked_exchanges(code) == [], name


def test_lds_is_read_in_dwords(kernels: list[Kernel]) -> None:
    """clang 19 cuts some copies of 32 bytes into loads of 16 at odd addresses and single bytes."""
    for name, code in disassembled(kernels, "gfx"):
        wide = re.findall(r"ds_(?:load|read)_b(?:32|64|96|128) [^\n]*offset:(\d+)", code)
        assert [offset for offset in wide if int(offset) % 4] == [], name


def disassembled(kernels: list[Kernel], prefix: str) -> list[tuple[str, str]]:
    """(file, assembly) of the code objects of the architectures that begin with `prefix`."""
    paths = sorted({kernel.code_object for kernel in kernels if kernel.target.startswith(prefix)})
    return [(path.name, assembly(path)) for path in paths]


@cache
def assembly(code_object: Path) -> str:
    command = [llvm_tool("llvm-objdump"), "-d", "--no-show-raw-insn", str(code_object)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def masked_exchanges(code: str) -> list[str]:
    """The v_permlanex16 of some assembly (wave32) that stand where lanes may be off."""
    masks: set[str] = set()
    exchanges, saved = [], ""
    for line in code.splitlines():
        instruction = line.split("//")[0].strip()
        if instruction.endswith(">:") or instruction.startswith("s_branch"):
            masks = set()  # what follows is reached by jumps from elsewhere
        elif match := re.match(r"s_and_saveexec_b32 (\w+),", instruction):
            masks.add(match[1])
        elif match := re.match(r"s_mov_b32 (\w+), exec_lo", instruction):
            saved = match[1]
        elif instruction.startswith("v_cmpx"):
            masks.add(saved)
        elif match := re.match(r"s_(?:or_b32 exec_lo, exec_lo|mov_b32 exec_lo), (\w+)", instruction):
            masks.discard(match[1])
        elif instruction.startswith("v_permlanex16") and masks:
            exchanges.append(instruction)
    return exchanges


def test_masked_exchanges_are_found() -> None:
    exchange = "v_permlanex16_b32 v1, v1, s0, s1"
    branch = "s_and_saveexec_b32 s4, s8\n{}\ns_or_b32 exec_lo, exec_lo, s4\n{}"
    assert masked_exchanges(branch.format(exchange, "")) == [exchange]
    assert masked_exchanges(branch.format("", exchange)) == []


@pytest.mark.parametrize("arch", ["gfx11", "gfx12"])
def test_no_cache_flush_and_global_memory_only(kernels: list[Kernel], arch: str) -> None:
    """What __syncthreads(), and pointers that may be null, would make of the code."""
    for _, text in disassembled(kernels, arch):
        alone = (
            "bias",
            "linear",
            "upsample",
            "subpixel",
            "nhwc_conv_kernel",
            "winograd",
        )  # whose threads wait for no others
        assert "s_barrier" in text or any(word in text for word in alone)
        assert sorted(set(re.findall(r"\t(flat_\w+|buffer_gl\w+|global_(?:inv|wb)\w*)", text))) == []


def test_resources_table_is_current(kernels: list[Kernel]) -> None:
    """results/ops_amd_resources.md is what this compiler makes of these sources (scripts/amd/amd_resources.py)."""
    committed = (ROOT / "results/ops_amd_resources.md").read_text()
    assert kernel_names(committed) == kernel_names(code_objects.table(kernels))


def kernel_names(table: str) -> set[str]:
    return {line.split(" |")[0] for line in table.splitlines() if line.startswith("| ") and "<" in line}


@pytest.mark.parametrize("name", [*([] if HIP_WHEEL else [library.HIP_LIBRARY]), library.PROVIDER_LIBRARIES["hip"]])
def test_the_libraries_link_to_no_hip(hip_library: Path, name: str) -> None:
    """Nor to libstdc++, and export only their own functions. HIP is loaded at its first use (hip_runtime.h)."""
    path = hip_library.with_name(name)
    needed = {entry.split(".so")[0] for entry in needed_libraries(path)}
    assert needed <= {"libc", "libm", "libgcc_s", "libdl", "libpthread", "ld-linux-x86-64", "ld-linux-aarch64"}
    assert search_folders(path) == []
    dynamic = subprocess.run(["readelf", "-dW", str(path)], capture_output=True, text=True, check=True).stdout
    assert "amdhip64" not in dynamic
    assert "NODELETE" in dynamic
    symbols = subprocess.run(["nm", "-D", "--defined-only", str(path)], capture_output=True, text=True, check=True)
    exported = {line.split()[-1].split("@")[0] for line in symbols.stdout.splitlines()}
    assert {symbol for symbol in exported if not symbol.startswith("sd_ort_")} == (
        {"CreateEpFactories", "ReleaseEpFactory"} if "_ep_" in name else set()
    )
    assert path.stat().st_size < 7_500_000 * len(TARGETS)


def test_no_thread_ends_another_ones_capture() -> None:
    """With HIP, each of these functions invalidates the captures of all threads (common/capture.h)."""
    source = (library.SOURCES / "common/vendors/hip_runtime.h").read_text()
    functions = set(re.findall(r"SD_ORT_HIP_FUNCTION\((hip\w+)\)", source))
    assert "hipMemcpyAsync" in functions
    assert functions & {"hipDeviceSynchronize", "hipMemcpy", "hipMemcpyWithStream", "hipMemset"} == set()


# Called with libsd_ort_hip.so: every candidate with every case that it supports. Kernels do not run: tensors need no
# memory.
LAUNCH_CANDIDATES = """
import sys
from pathlib import Path
from custom_ops import GPU_OPERATORS
from custom_ops.libraries import GpuLibrary
from custom_ops.operator_spec import load

library = GpuLibrary(Path(sys.argv[1]))
for operator in map(load, GPU_OPERATORS):
    for case in operator.cases:
        for dtype in case.dtypes:
            names = (*case.inputs, *operator.output_shapes(case), "workspace")
            address = {name: index << 40 for index, name in enumerate(names, start=1)}
            params = operator.params(case, dtype, address)
            number = library.operator(operator.name, params)
            for index, _ in enumerate(library.candidates(number)):
                if library.is_supported(number, index, params):
                    library.run(number, index, params, address["workspace"])
"""


def test_every_kernel_is_launched_by_a_case(hip_library: Path, kernels: list[Kernel], tmp_path: Path) -> None:
    """Of each architecture: a kernel that no case launches is compared with nothing.

    One without registers is empty: the target does not multiply its type.
    """
    for arch in TARGETS:
        report = tmp_path / f"{arch}.json"
        device = GENERIC.get(arch, (arch,))[-1]  # the last one: the first has kernels of its own in `all_architectures`
        simulate(device, report, "-c", LAUNCH_CANDIDATES, str(hip_library))
        launched = json.loads(report.read_text())["kernels"]
        symbols = {kernel.symbol for kernel in kernels if kernel.target == arch and kernel.vgprs}
        assert symbols - set(launched) == set()


def simulate(target: str, report: Path, *arguments: str, **variables: str) -> None:
    """Run Python on a simulated GPU whose kernels do nothing; `report` lists the kernels and calls."""
    command = [sys.executable, str(ROOT / "scripts/amd/simulate"), target, "--kernels", "skip", "--only-hip"]
    command += ["--report", str(report), "--", "env", f"PYTHONPATH={ROOT}"]
    command += [*(f"{name}={value}" for name, value in variables.items()), sys.executable, *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_building_loads_no_hip(hip_library: Path, tmp_path: Path) -> None:
    """A build must not use the machine's GPU: hipBLASLt once multiplied in a build, at addresses without memory."""
    compiler, cache = copying_compiler(tmp_path), tmp_path / "cache"
    load = f"import ctypes; library = ctypes.CDLL('{hip_library}')"
    assert loaded_hip_libraries(tmp_path / "load", ("-c", load)) == set()
    assert loaded_hip_libraries(tmp_path / "use", ("-c", f"{load}; library.sd_ort_gpu_arch()")) == {"libamdhip64"}
    command = ("-m", "sd_ort", "build-ops", "--hip", "gfx1100", "--no-cpu")
    variables = {"HIPCXX": str(compiler), "BUILT": str(hip_library.parent), "XDG_CACHE_HOME": str(cache)}
    assert loaded_hip_libraries(tmp_path / "build", command, **variables) == set()
    assert len(list(cache.glob(f"sd-ort/ops/*/{library.HIP_LIBRARY}"))) == 1


def loaded_hip_libraries(folder: Path, arguments: Sequence[str], **variables: str) -> set[str]:
    """Return the names of HIP's libraries that Python or a child process loads, where the loader finds them."""
    folder.mkdir()
    log = {"LD_DEBUG": "files", "LD_DEBUG_OUTPUT": str(folder / "process")}
    simulate("gfx1100", folder / "report.json", *arguments, **log, **variables)
    texts = [path.read_text() for path in folder.glob("process.*")]
    return {name for text in texts for name in re.findall(r"calling init: \S+/(lib(?:amdhip64|hip)\w*)\.so", text)}


@pytest.mark.parametrize("target", ["gfx1010", "gfx1012"])
def test_unknown_targets_do_not_compile(target: str) -> None:
    """To kernels that multiply nothing."""
    compiler = build.find_hip_compiler()
    flags = ["-x", "hip", f"--offload-arch={target}", "--cuda-device-only", "-fsyntax-only", "-D__HIP_PLATFORM_AMD__"]
    source = library.SOURCES / "common/vendors/hip.h"
    command = [compiler.path, *compiler.flags, *flags, f"-I{library.SOURCES}", str(source)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert "no kernel is written for this AMD target" in run.stderr


def test_cuda_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel, to machine code of sm_90a, in half the time that fast ones take: kept where no session finds it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_folder() / "compiled-only"))
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-Ofc=max" if "-Ofc" in nvcc_options() else "")
    assert build.build(cpu=False, cuda=["sm_90"]).is_file()


def nvcc_options() -> str:
    return subprocess.run(["nvcc", "--help"], capture_output=True, text=True, check=True).stdout


def test_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(library.BuildError, match="cmake is not on PATH"):
        build.build(cuda=["sm_90"])


def test_header_option_is_checked(tmp_path: Path) -> None:
    with pytest.raises(library.BuildError, match=r"has no onnxruntime_c_api\.h"):
        headers.find_headers(tmp_path)


@pytest.mark.parametrize("words", ["--hip gfx90a gfx942 --cuda sm_90", "--hip gfx90a --cuda sm_90 --hip gfx942"])
def test_command_takes_several_architectures(words: str, sd_ort: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    passed: dict = {}
    monkeypatch.setattr(build, "build", lambda **options: passed.update(options))
    assert sd_ort("build-ops", *words.split(), "--no-cpu")[0] == 0
    assert (passed["hip"], passed["cuda"], passed["cpu"]) == (("gfx90a", "gfx942"), ("sm_90",), False)


def test_command_refuses_other_words(sd_ort: Cli) -> None:
    code, _, error = sd_ort("build-ops", "gfx90a")
    assert code == 2
    assert "gfx90a" in error
