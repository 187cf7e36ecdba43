#!/usr/bin/env python3
"""Calls of the CUDA runtime that end the capture of another thread's stream, by trying each.

    python scripts/checks/capture_calls.py --out results/capture_calls.json

One thread captures two asynchronous memsets again and again, in the relaxed mode in which sd-ort captures, on a stream
of cudaStreamDefault and on one of cudaStreamNonBlocking. Another thread makes one call again and again. The table has
how many of `--captures` captures failed, and what the call returned when it failed. runtime/capture_lock.py says which
side of its lock a call belongs to.
"""

from __future__ import annotations

import argparse
import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.report import save, table
from sd_ort.runtime import machine
from sd_ort.runtime.library import CUDA_LIBRARY, library_path

STREAMS = {"cudaStreamDefault": 0, "cudaStreamNonBlocking": 1}
RELAXED = 2  # cudaStreamCaptureModeRelaxed
BYTES = 1 << 20
PROPERTIES = 16384  # bytes, more than cudaDeviceProp has
MAX_SMEM = 8  # cudaDevAttrMaxSharedMemoryPerBlock


PTX = b""".version 7.0
.target sm_80
.address_size 64
.visible .entry nothing() { ret; }
\0"""


def loaded(name: str) -> ctypes.CDLL:
    """Return a library that torch has loaded, by the beginning of its file's name."""
    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    return ctypes.CDLL(next(path for path in sorted(paths) if Path(path).name.startswith(name)))


class Runtime:
    """The CUDA runtime that torch has loaded, on device 0."""

    def __init__(self) -> None:
        import torch

        zeros = torch.zeros(1, 8, 8, 8, device="cuda")
        torch.nn.functional.conv2d(zeros, zeros)  # loads cuDNN
        self.c = loaded("libcudart")

    def __call__(self, name: str, *arguments: Any) -> int:
        """Return the error of a call."""
        return int(getattr(self.c, name)(*arguments))

    def pointer(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        """Return the handle that a call creates. Raises RuntimeError if it fails."""
        handle = ctypes.c_void_p()
        if code := self(name, ctypes.byref(handle), *arguments):
            raise RuntimeError(f"{name} failed with error {code}")
        return handle


def calls(cuda: Runtime) -> dict[str, Callable[[], int]]:
    """Return the calls of the other thread by name; each returns an error or 0."""
    size = ctypes.c_size_t(BYTES)
    memory = cuda.pointer("cudaMalloc", size)
    host = (ctypes.c_char * BYTES)()
    pinned = cuda.pointer("cudaHostAlloc", size, 0)
    own = cuda.pointer("cudaStreamCreateWithFlags", 1)
    event = cuda.pointer("cudaEventCreateWithFlags", 2)
    driver = loaded("libcuda.so")
    number, free, total = ctypes.c_int(), ctypes.c_size_t(), ctypes.c_size_t()
    properties = ctypes.create_string_buffer(PROPERTIES)
    cpu_library = library_path()
    assert cpu_library is not None, "build first: sd-ort build-ops --cuda sm_90"
    library = ctypes.CDLL(str(cpu_library.parent / CUDA_LIBRARY))
    for each in (library.sd_ort_gpu_arch, library.sd_ort_gpu_versions):
        each.restype = ctypes.c_char_p

    def pair(make: str, end: str, *arguments: Any) -> int:
        handle = ctypes.c_void_p()
        return cuda(make, ctypes.byref(handle), *arguments) or cuda(end, handle)

    def library_pair(name: str, make: str, end: str) -> Callable[[], int]:
        functions = loaded(name)

        def call() -> int:
            handle = ctypes.c_void_p()
            return int(getattr(functions, make)(ctypes.byref(handle)) or getattr(functions, end)(handle))

        return call

    def loaded_module() -> int:
        module = ctypes.c_void_p()
        return int(driver.cuModuleLoadData(ctypes.byref(module), PTX) or driver.cuModuleUnload(module))

    graph = cuda.pointer("cudaGraphCreate", 0)

    def instantiated_graph() -> int:
        executable = ctypes.c_void_p()
        return cuda("cudaGraphInstantiateWithFlags", ctypes.byref(executable), graph, 0) or cuda(
            "cudaGraphExecDestroy", executable
        )

    def ended_stream() -> int:
        stream = ctypes.c_void_p()
        return (
            cuda("cudaStreamCreateWithFlags", ctypes.byref(stream), 1)
            or cuda("cudaMemsetAsync", memory, 0, size, stream)
            or cuda("cudaStreamDestroy", stream)
        )

    return {
        "nothing": lambda: 0,
        "cudaGetDeviceProperties": lambda: cuda("cudaGetDeviceProperties", properties, 0),
        "cudaDeviceGetAttribute": lambda: cuda("cudaDeviceGetAttribute", ctypes.byref(number), MAX_SMEM, 0),
        "cudaDriverGetVersion": lambda: cuda("cudaDriverGetVersion", ctypes.byref(number)),
        "cudaMemGetInfo": lambda: cuda("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total)),
        "cudaSetDevice": lambda: cuda("cudaSetDevice", 0),
        "sd_ort_gpu_arch": lambda: 0 if library.sd_ort_gpu_arch() else 1,
        "sd_ort_gpu_versions": lambda: 0 if library.sd_ort_gpu_versions() else 1,
        "cudaMalloc, cudaFree": lambda: pair("cudaMalloc", "cudaFree", size),
        "cudaHostAlloc, cudaFreeHost": lambda: pair("cudaHostAlloc", "cudaFreeHost", size, 0),
        "cudaStreamCreate, cudaStreamDestroy": ended_stream,
        "cudaEventCreate, cudaEventDestroy": lambda: pair("cudaEventCreateWithFlags", "cudaEventDestroy", 2),
        "cudaMemcpyAsync, cudaStreamSynchronize": lambda: (
            cuda("cudaMemcpyAsync", memory, pinned, size, 1, own) or cuda("cudaStreamSynchronize", own)
        ),
        "cudaEventRecord, cudaEventSynchronize": lambda: (
            cuda("cudaEventRecord", event, own) or cuda("cudaEventSynchronize", event)
        ),
        "cuModuleLoadData, cuModuleUnload": loaded_module,
        "cudaGraphInstantiate, cudaGraphExecDestroy": instantiated_graph,
        "cublasLtCreate, cublasLtDestroy": library_pair("libcublasLt.so", "cublasLtCreate", "cublasLtDestroy"),
        "cudnnCreate, cudnnDestroy": library_pair("libcudnn.so", "cudnnCreate", "cudnnDestroy"),
        "cudaMemcpy, host to device": lambda: cuda("cudaMemcpy", memory, host, size, 1),
        "cudaMemcpy, device to host": lambda: cuda("cudaMemcpy", host, memory, size, 2),
        "cudaMemset": lambda: cuda("cudaMemset", memory, 0, size),
        "cudaDeviceSynchronize": lambda: cuda("cudaDeviceSynchronize"),
    }


def failed_captures(cuda: Runtime, flags: int, captures: int, call: Callable[[], int]) -> tuple[int, list[int]]:
    """Return the number of captures that failed while another thread ran `call`, and the errors of `call`."""
    stream = cuda.pointer("cudaStreamCreateWithFlags", flags)
    memory = cuda.pointer("cudaMalloc", ctypes.c_size_t(BYTES))
    done, started, errors = threading.Event(), threading.Event(), set()

    def repeat() -> None:
        cuda("cudaSetDevice", 0)  # makes the device's context that of the thread
        cuda("cudaFree", None)
        while not done.is_set():
            errors.add(call())
            started.set()

    other = threading.Thread(target=repeat)
    other.start()
    started.wait()
    failed = 0
    for _ in range(captures):
        graph = ctypes.c_void_p()
        code = cuda("cudaStreamBeginCapture", stream, RELAXED)
        for value in range(20):
            code = code or cuda("cudaMemsetAsync", memory, value, ctypes.c_size_t(BYTES), stream)
        code = cuda("cudaStreamEndCapture", stream, ctypes.byref(graph)) or code
        failed += bool(code)
        if graph:
            cuda("cudaGraphDestroy", graph)
        cuda("cudaGetLastError")
    done.set()
    other.join()
    cuda("cudaStreamSynchronize", stream)
    cuda("cudaStreamDestroy", stream)
    cuda("cudaFree", memory)
    return failed, sorted(errors - {0})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--captures", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path("results/capture_calls.json"))
    arguments = parser.parse_args()
    cuda = Runtime()
    rows: list[dict[str, Any]] = []
    for name, call in calls(cuda).items():
        for stream, flags in STREAMS.items():
            failed, errors = failed_captures(cuda, flags, arguments.captures, call)
            rows.append({"call": name, "stream": stream, "failed": failed, "errors": errors})
            print(rows[-1], flush=True)
    result = {"captures": arguments.captures, "rows": rows}
    result |= {"machine": machine.machine(), "versions": machine.versions(), "commit": machine.commit()}
    names = ("call of the other thread", "captured stream", f"failed of {arguments.captures}", "errors of the call")
    cells = [
        (row["call"], row["stream"], row["failed"], " ".join(str(code) for code in row["errors"]) or "none")
        for row in rows
    ]
    ending = sorted({row["call"] for row in rows if row["failed"]})
    lines = [
        "# Calls that end another thread's capture", "",
        f"On CUDA these end a capture that another thread has begun: {', '.join(ending) or 'none'}. "
        "Made by `scripts/checks/capture_calls.py`.", "",
        *table(names, cells),
    ]  # fmt: skip
    save(arguments.out, result, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
