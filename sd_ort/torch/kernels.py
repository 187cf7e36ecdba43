"""The operator libraries on torch tensors: which library serves a device, and how a kernel is launched there."""

from __future__ import annotations

import atexit
import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

from custom_ops.libraries import CpuLibrary, GpuLibrary, ParallelFor
from sd_ort.runtime import tuning
from sd_ort.runtime.library import CUDA_LIBRARY, HIP_LIBRARY, LIBRARY, library_path

INTERFACE_VERSION = 4  # custom_ops/interface.h
DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # common/op.h: DType


class UnsupportedCall(Exception):
    """A call that no kernel supports: the torch fallback runs, and `status()` counts it under this message."""


class Kernels(Protocol):
    """The kernels of one operator library, for one type of device."""

    dtypes: frozenset[torch.dtype]

    def run(self, name: str, params: ctypes.Structure, device: torch.device) -> None:
        """Launch an operator on the device's current stream. Raises UnsupportedCall if no kernel supports the call."""


def kernels_for(*tensors: torch.Tensor | None) -> Kernels:
    """Return the kernels for the arguments of a call; the first one is a tensor.

    Raises UnsupportedCall if there is no library or the library lacks the dtype of the first tensor, RuntimeError if
    the tensors are on two devices.
    """
    first = tensors[0]
    assert first is not None
    for tensor in tensors:
        if tensor is not None and tensor.device != first.device:
            devices = sorted({str(other.device) for other in tensors if other is not None})
            raise RuntimeError(f"The tensors of one call are on {' and '.join(devices)}: move them to one device.")
    kernels = cpu_kernels() if first.is_cpu else gpu_kernels()
    if first.dtype not in kernels.dtypes:
        raise UnsupportedCall(f"no kernel for {str(first.dtype).removeprefix('torch.')}")
    return kernels


@cache
def _open_library(name: str) -> tuple[Any, str]:
    """Return the library of this file name and "", or None and the reason."""
    path = library_path(name)
    if path is None:
        return None, f"no {name} of these sources: run sd-ort build-ops"
    try:
        library = CpuLibrary(path) if name == LIBRARY else GpuLibrary(path)
    except (OSError, AttributeError):
        return None, f"{name} cannot be loaded"
    if library.c.sd_ort_interface_version() != INTERFACE_VERSION:
        return None, f"{name} has another interface version"
    return library, ""


@cache
def _open_kernels(name: str) -> Kernels | str:
    """Return the kernels of a library, or the reason why there are none."""
    library, reason = _open_library(name)
    if library is None:
        return reason
    return CpuKernels(library) if name == LIBRARY else GpuKernels(library)


def _require_kernels(name: str) -> Kernels:
    kernels = _open_kernels(name)
    if isinstance(kernels, str):
        raise UnsupportedCall(kernels)
    return kernels


def cpu_kernels() -> Kernels:
    """Return the CPU kernels. Raises UnsupportedCall without a library."""
    return _require_kernels(LIBRARY)


def gpu_kernels() -> Kernels:
    """Return the HIP kernels in a HIP build of torch, else the CUDA ones. Raises UnsupportedCall without a library."""
    return _require_kernels(HIP_LIBRARY if torch.version.hip else CUDA_LIBRARY)


@cache
def is_hopper_or_newer(device: torch.device) -> bool:
    """Return whether a GPU is an NVIDIA one of compute capability 9 or more. Some choices were measured on these."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def reset_libraries() -> None:
    """Look for the libraries again: for tests, and after `sd-ort build-ops` in the same process."""
    _open_library.cache_clear()
    _open_kernels.cache_clear()


class CpuKernels:
    """The kernels of libsd_ort_ops.so, on as many threads as torch uses."""

    dtypes = frozenset({torch.float32, torch.float16})

    def __init__(self, library: CpuLibrary) -> None:
        self._library = library

    def run(self, name: str, params: ctypes.Structure, device: torch.device) -> None:
        try:
            self._library.run(name, params, _parallel_for(torch.get_num_threads()))
        except LookupError as error:
            raise UnsupportedCall("the library has no such CPU kernel") from error
        except RuntimeError as error:
            raise UnsupportedCall(str(error)) from error


@cache
def _parallel_for(threads: int) -> object | None:
    """Return the library's parallel loop over `threads` threads with even shares, or None for the caller's thread."""
    if threads == 1:
        return None
    pool = ThreadPoolExecutor(threads - 1, thread_name_prefix="sd_ort")

    def run_share(body: Any, context: int, first: int, end: int) -> None:
        for i in range(first, end):
            body(context, i)

    def run(_: int, body: Any, count: int, context: int) -> None:
        shares = min(threads, count)
        bounds = [count * i // shares for i in range(shares + 1)] if shares else [0]
        others = [pool.submit(run_share, body, context, *bounds[i : i + 2]) for i in range(1, shares)]
        if shares:
            run_share(body, context, bounds[0], bounds[1])
        wait(others)

    return ParallelFor(run)


class GpuKernels:
    """The kernels of libsd_ort_cuda.so or libsd_ort_hip.so, on torch's current stream.

    Scratch memory comes from torch's allocator. `without_workspace` (level "memory"): run only candidates that need no
    scratch memory.
    """

    dtypes = frozenset(DTYPE_CODES)

    def __init__(self, library: GpuLibrary) -> None:
        self._library = library
        self._operator_ids: dict[str, int] = {}
        self._lock = threading.Lock()
        self.without_workspace = False
        self._tuning_loaded = False
        self._tuning = False

    @property
    def path(self) -> Path:
        return self._library.path

    def run(self, name: str, params: ctypes.Structure, device: torch.device) -> None:
        index = device.index
        if index == torch._C._cuda_getDevice():
            self.launch(name, params, device, torch._C._cuda_getCurrentRawStream(index))
            return
        with torch.cuda.device(device):
            self.launch(name, params, device, torch._C._cuda_getCurrentRawStream(index))

    def launch(self, name: str, params: ctypes.Structure, device: torch.device, stream: int) -> None:
        """Launch an operator on `stream` of the current device. Raises UnsupportedCall."""
        library = self._library
        self._load_tuning()
        try:
            operator = self._operator_ids.get(name)
            if operator is None:
                operator = self._operator_ids[name] = library.operator(name, params)
            candidate = self._choose(operator, params, stream)
            size = library.workspace_bytes(operator, candidate, params)
            if size and self.without_workspace:
                candidate = self._candidate_without_workspace(operator, params)
                size = 0
            workspace = torch.empty(size, dtype=torch.uint8, device=device) if size else None
            library.run(operator, candidate, params, workspace.data_ptr() if workspace is not None else 0, stream)
        except LookupError as error:
            raise UnsupportedCall("the library has no such kernel") from error
        except RuntimeError as error:
            raise UnsupportedCall(str(error)) from error

    def _choose(self, operator: int, params: ctypes.Structure, stream: int) -> int:
        """Return the tuned candidate or the default one. Nothing is measured while the stream is captured."""
        if not (self._tuning and torch.cuda.is_current_stream_capturing()):
            return self._library.choose(operator, params, stream)
        self._library.c.sd_ort_enable_tuning(0)
        try:
            return self._library.choose(operator, params, stream)
        finally:
            self._library.c.sd_ort_enable_tuning(1)

    def _candidate_without_workspace(self, operator: int, params: ctypes.Structure) -> int:
        """Return the last candidate that supports the call without scratch memory; candidate 0 of most operators does.

        Raises UnsupportedCall if every candidate needs scratch memory.
        """
        for candidate in reversed(range(len(self._library.candidates(operator)))):
            supported = self._library.is_supported(operator, candidate, params)
            if supported and not self._library.workspace_bytes(operator, candidate, params):
                return candidate
        raise UnsupportedCall("every kernel for it needs scratch memory")

    def replace_memsets(self, graph: int) -> None:
        """Replace the memset nodes of a cudaGraph_t, which take 3 us each, by kernels. Call before instantiation."""
        self._library.c.sd_ort_replace_memsets(graph)

    # ---- Tuning, by the files and the tuner that sessions use (sd_ort/runtime/tuning.py)

    def _load_tuning(self) -> None:
        """Load the tuning results of earlier processes on this machine, once."""
        if self._tuning_loaded:
            return
        with self._lock:
            if not self._tuning_loaded:
                tuning.load(None, tuning.GpuOps(self.path), _tuning_version())
                self._tuning_loaded = True

    @property
    def is_tuning(self) -> bool:
        """Whether every call of a new shape is measured, with the vendor's library among the candidates."""
        return self._tuning

    def set_tuning(self, enabled: bool) -> None:
        """Enable or disable measuring the first call of each new shape. The results are saved at process exit."""
        if enabled and not self._tuning:
            atexit.register(self.save_tuning)
        self._tuning = enabled
        tuning.GpuOps(self.path).enable(enabled)

    def save_tuning(self) -> Path | None:
        """Write the results to the file that later processes load. Returns its path, or None without results."""
        return tuning.save([], tuning.GpuOps(self.path), _tuning_version())


def _tuning_version() -> str:
    """Return torch's version, in the place of ONNX Runtime's: MatMul and attention compete with torch's libraries."""
    return f"torch {torch.__version__}"
