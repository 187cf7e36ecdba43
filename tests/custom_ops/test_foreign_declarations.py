"""Every declaration of foreign libraries in sd-ort against the vendors' own headers, by static assertions.

C++ declarations are asserted in tests/abi, a file for each foreign header. For Python's, which ctypes leaves unstated,
the assertions are made from the calls. HIP 6 and 7, hipBLASLt 7.1 and 7.2 come from Debian, CUDA 12 and 13, cuBLASLt,
cuDNN 8.9 and 9 and NVML from PyPI.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
from emulation import COMPILER
from nvidia_headers import nvidia_headers
from recorded_calls import Calls

from custom_ops import libraries
from custom_ops.check.memory import DeviceMemory
from scripts.amd.rocm_headers import SUITES, rocm_headers
from sd_ort.runtime import device_meters, glibc_malloc, gpu_graphs, stream, visible_devices
from sd_ort.runtime.headers import find_headers

ROOT = Path(__file__).resolve().parents[2]

HIP = ["-D__HIP_PLATFORM_AMD__"]
CPP = ["g++", "-std=c++17", "-fsyntax-only", f"-I{ROOT}/custom_ops", f"-I{ROOT}/tests/abi"]


def assert_compiles(source: Path, include: Path, options: Sequence[str] = ()) -> None:
    """Fail with the compiler's errors, each static assertion's among them."""
    done = subprocess.run([*CPP, *options, f"-I{include}", str(source)], capture_output=True, text=True, check=False)
    errors = [line for line in done.stderr.splitlines() if "error:" in line or "note: the comparison" in line]
    assert (done.returncode, errors) == (0, []), done.stderr[-4000:]


@pytest.fixture(scope="module")
def rocm() -> list[Path]:
    """Include folders of AMD's libraries, one a version of HIP."""
    folders = rocm_headers()
    assert 1 <= len(folders) <= len(SUITES)
    return folders


def test_versions_of_hip(rocm: list[Path]) -> None:
    """A folder's name is what its header says, and HIP 7 is among them: it is what the onnxruntime-rocm wheel needs."""
    for include in rocm:
        lines = (include / "hip/hip_version.h").read_text().splitlines()
        major, minor = (next(line.split()[2] for line in lines if f"HIP_VERSION_{part} " in line) for part in (
            "MAJOR", "MINOR"))  # fmt: skip
        assert include.parent.name.startswith(f"{major}.{minor}.")
    assert any(include.parent.name.startswith("7.") for include in rocm)


# The wheels of one version have 1.2 GB: the older one runs with -m wheels.
CUDA_VERSIONS = (pytest.param("12", marks=pytest.mark.wheels), "13")


@pytest.mark.parametrize("name", ["hipblaslt", "hip_launch"])
def test_declarations_for_amd(rocm: list[Path], name: str) -> None:
    for include in rocm:
        assert_compiles(ROOT / f"tests/abi/{name}.cc", include, HIP)


@pytest.mark.parametrize("version", CUDA_VERSIONS)
@pytest.mark.parametrize("name", ["cublaslt", "cudnn", "cuda_driver"])
def test_declarations_for_nvidia(version: str, name: str) -> None:
    assert_compiles(ROOT / f"tests/abi/{name}.cc", nvidia_headers(version))


def test_calls_of_hip_compile(rocm: list[Path], tmp_path: Path) -> None:
    """What calls HIP by its headers, the host's part of it, against each version: no other test has HIP 6 and 7."""
    sources = [ROOT / "custom_ops" / name for name in ("common/tuner.cc", "provider/device.cc")]
    sources.append(ROOT / "custom_ops/common/vendors/hip_runtime.cc")
    sources += (ROOT / "custom_ops/operators/bias_add/kernels").glob("*.hip")
    assert len(sources) > 2
    flags = ["-x", "hip", "--offload-host-only", "--offload-arch=gfx1100", "-nogpulib", "-fsyntax-only", "-std=c++17"]
    flags += ["-Wall", "-Werror=deprecated-declarations", '-DSD_ORT_BUILD_HASH="syntax"', f"-I{ROOT}/custom_ops"]
    flags += [f"-I{find_headers()}"]
    for include in rocm:
        tree = tmp_path / include.parent.name  # as ROCm is installed
        for name in ("bin/.hipVersion", "share/hip/version"):
            (tree / name).parent.mkdir(parents=True)
            major, minor, _ = tree.name.split(".")
            (tree / name).write_text(f"HIP_VERSION_MAJOR={major}\nHIP_VERSION_MINOR={minor}\nHIP_VERSION_PATCH=0\n")
        (tree / "include").symlink_to(include)
        for source in sources:
            command = [COMPILER, *flags, f"--rocm-path={tree}", str(source)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{tree.name}: {done.stderr[-4000:]}"


def test_no_assertion_is_forgotten() -> None:
    """Each file of tests/abi is compiled by one of the tests above."""
    assert {path.stem for path in (ROOT / "tests/abi").glob("*.cc")} == {
        *("hipblaslt", "hip_launch", "cublaslt", "cudnn", "cuda_driver")
    }


def calls_of_stream(monkeypatch: pytest.MonkeyPatch, prefix: str) -> Calls:
    """Calls of sd_ort/runtime/stream.py and custom_ops/check/memory.py to a vendor's runtime: "cuda" or "hip"."""
    library = {prefix: name for name, prefix in stream.RUNTIMES.items()}[prefix]
    calls = Calls(library)
    monkeypatch.setattr(ctypes, "CDLL", calls)
    first, second = stream.Stream(library, prefix), stream.Stream(library, prefix)
    first.reserve(2)
    first.record(0)
    first.wait(0)
    first.seconds(0, 1)
    first.wait_event(second.event())
    first.copy_to_peer(0, second, 0, 1)
    first.synchronize()
    assert first.free_bytes() == 1
    graph = gpu_graphs.GpuGraph(first, lambda: None)
    graph.launch()
    graph.release()
    monkeypatch.setattr(gpu_graphs, "HOST_TO_DEVICE", 0)
    assert not gpu_graphs.copies_pageable_memory(first, ctypes.c_void_p())
    monkeypatch.setattr(gpu_graphs, "HOST_NODE", 1)
    assert gpu_graphs.take_release(first, ctypes.c_void_p()) is not None
    memory = DeviceMemory()
    assert memory.upload(np.zeros(1, np.uint8)).download().size == 1
    memory.synchronize()
    assert [call[3] for call in calls.values[f"{prefix}Memcpy"]] == [1, 2]
    assert len(calls.declarations) > 15
    return calls


def assert_calls_fit(
    calls: Calls, include: Path, headers: Iterable[str], folder: Path, kind: str = "decltype({})", more: str = "",
    options: Sequence[str] = (),
) -> None:  # fmt: skip
    """`kind`: the type of a function in the headers, by its name."""
    source = folder / "calls.cc"
    source.write_text(
        "".join(f"#include <{name}>\n" for name in headers)
        + '#include <cstddef>\n#include "same_abi.h"\n'
        + calls.structure_definitions()
        + "".join(
            f'static_assert(abi::same_function<{declaration}, {kind.format(name)}>, "{name} is called otherwise");\n'
            for name, declaration in calls.declarations.items()
        )
        + more
    )
    assert_compiles(source, include, options)


def graphs_abi(prefix: str) -> str:
    """Assertions of the constants and structures of sd_ort/runtime/gpu_graphs.py."""
    constants = {
        "StreamCaptureModeRelaxed": gpu_graphs.RELAXED,
        "GraphNodeTypeMemcpy": gpu_graphs.MEMCPY_NODE,
        "GraphNodeTypeHost": gpu_graphs.HOST_NODE,
        "MemcpyHostToDevice": gpu_graphs.HOST_TO_DEVICE,
    }
    members = {
        "HostNodeParams": [("fn", "fn"), ("userData", "userData")],
        "MemcpyParams": [("srcPtr", "srcPtr.ptr"), ("kind", "kind")],
    }
    theirs = {"HostNodeParams": f"{prefix}HostNodeParams", "MemcpyParams": f"{prefix}Memcpy3DParms"}
    lines = [f"static_assert({prefix}{name} == {value});" for name, value in constants.items()]
    for ours, pairs in members.items():
        if ours == "MemcpyParams" and prefix == "hip":
            continue  # HIP is not asked for it
        lines += [f"static_assert(sizeof({ours}) == sizeof({theirs[ours]}));"]
        lines += [f"static_assert(offsetof({ours}, {a}) == offsetof({theirs[ours]}, {b}));" for a, b in pairs]
    return "\n".join(lines) + "\n"


def test_calls_of_hip_from_python(rocm: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of_stream(monkeypatch, "hip")
    monkeypatch.undo()
    copies = "static_assert(hipMemcpyHostToDevice == 1 && hipMemcpyDeviceToHost == 2 && hipSuccess == 0);\n"
    for include in rocm:
        assert_calls_fit(calls, include, ["hip_types.h"], tmp_path, "t_{}", copies + graphs_abi("hip"), HIP)


def test_question_for_the_pci_address(rocm: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sd_ort/runtime/device_meters.py asks HIP in a process of its own."""
    commands: list[list[str]] = []

    def record(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "")

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "run", record)
        assert device_meters.hip_pci_address() is None
    calls = Calls()
    with monkeypatch.context() as patched:
        patched.setattr(ctypes, "CDLL", calls)
        patched.setattr(sys, "argv", commands[0][2:])
        exec(commands[0][2], {})
    assert list(calls.declarations) == ["hipDeviceGetPCIBusId"]
    for include in rocm:
        assert_calls_fit(calls, include, ["hip_types.h"], tmp_path, "t_{}", options=HIP)


@pytest.mark.parametrize("version", CUDA_VERSIONS)
def test_calls_of_cuda_from_python(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of_stream(monkeypatch, "cuda")
    monkeypatch.undo()
    copies = "static_assert(cudaMemcpyHostToDevice == 1 && cudaMemcpyDeviceToHost == 2 && cudaSuccess == 0);\n"
    more = copies + graphs_abi("cuda")
    assert_calls_fit(calls, nvidia_headers(version), ["cuda_runtime_api.h"], tmp_path, more=more)


@pytest.mark.parametrize("version", CUDA_VERSIONS)
def test_calls_of_nvml_from_python(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls("libnvidia-ml.so")
    monkeypatch.setattr(ctypes, "CDLL", calls)
    meter = device_meters.Nvml()
    assert meter.used_MB(0) is not None
    assert meter.energy_J() is not None
    assert visible_devices.nvidia_gpus() == 1
    monkeypatch.undo()
    [(name, structure)] = calls.structures.items()
    members = zip(structure._fields_, ("pid", "usedGpuMemory", "gpuInstanceId", "computeInstanceId"), strict=True)
    more = "".join(
        f"static_assert(offsetof({name}, {ours[0]}) == offsetof(nvmlProcessInfo_t, {theirs}));\n"
        f"static_assert(sizeof({name}::{ours[0]}) == sizeof(nvmlProcessInfo_t::{theirs}));\n"
        for ours, theirs in members
    )
    more += f"static_assert(sizeof({name}) == sizeof(nvmlProcessInfo_t) && NVML_SUCCESS == 0);\n"
    more += f"static_assert({device_meters.UNKNOWN}ull == static_cast<unsigned long long>(NVML_VALUE_NOT_AVAILABLE));\n"
    assert_calls_fit(calls, nvidia_headers(version), ["nvml.h"], tmp_path, more=more)


def test_calls_of_glibc_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    monkeypatch.setattr(glibc_malloc, "_LIBC", calls(None))
    glibc_malloc.disable_trim()
    with glibc_malloc.return_heap():
        glibc_malloc.trim_heap()
    monkeypatch.undo()
    names = [option for option, _ in calls.values["mallopt"]]
    expected = (
        "M_MMAP_MAX",
        "M_TRIM_THRESHOLD",
        "M_MMAP_MAX",
        "M_MMAP_THRESHOLD",
    )  # as disable_trim and return_heap say
    more = "".join(f"static_assert({number} == {name});\n" for number, name in zip(names, expected, strict=False))
    assert_calls_fit(calls, Path("/usr/include"), ["malloc.h"], tmp_path, more=more)


def test_own_interface_in_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """custom_ops/libraries.py declares what custom_ops/interface.h does."""
    calls = Calls()
    monkeypatch.setattr(ctypes, "CDLL", calls)
    for library in (libraries.GpuLibrary(Path("gpu")), libraries.CpuLibrary(Path("cpu"))):
        for name, function in vars(library.c).items():
            if name.startswith("sd_ort_"):
                arguments = ", ".join(calls.c_type(argument) for argument in function.argtypes)
                calls.declarations[name] = f"{calls.c_type(function.restype)} ({arguments})"
    monkeypatch.undo()
    assert len(calls.declarations) > 20
    assert_calls_fit(calls, ROOT / "custom_ops", ["interface.h"], tmp_path)
