"""The operator library as torch's tensors meet it: which one serves a device, and how a call is launched there."""

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

INTERFACE_VERSION = 2  # custom_ops/interface.h
# common/op.h: DType
NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class Refused(Exception):
    """No kernel takes a call: the plain torch expression runs, and its message is the reason that is counted."""


class Kernels(Protocol):
    """The kernels of one kind of device."""

    dtypes: frozenset[torch.dtype]

    def run(self, name: str, params: ctypes.Structure, device: torch.device) -> None:
        """Launches an operator on the device's current stream. Raises Refused when no kernel takes the call."""


def of(*tensors: torch.Tensor | None) -> Kernels:
    """The kernels for these tensors. Raises Refused: no library, a type it lacks, tensors of two devices."""
    first = tensors[0]
    assert first is not None
    device, dtype = first.device, first.dtype
    for tensor in tensors:
        if tensor is not None and tensor.device != device:
            places = sorted({str(each.device) for each in tensors if each is not None})
            raise RuntimeError(f"the tensors of one call lie on {' and '.join(places)}")
    found = cpu_kernels() if first.is_cpu else gpu_kernels()
    if dtype not in found.dtypes:
        raise Refused(f"no kernel for {str(dtype).removeprefix('torch.')}")
    return found


@cache
def _found(name: str) -> tuple[Any, str]:
    """The library of a name, or None and why there is none."""
    path = library_path(name)
    if path is None:
        return None, f"no {name} of these sources: sd-ort build-ops makes it"
    try:
        library = CpuLibrary(path) if name == LIBRARY else GpuLibrary(path)
    except (OSError, AttributeError):
        return None, f"{name} cannot be loaded"
    if library.c.sd_ort_interface_version() != INTERFACE_VERSION:
        return None, f"{name} has another interface"
    return library, ""


@cache
def _kernels(name: str) -> Kernels | str:
    library, why = _found(name)
    if library is None:
        return why
    return CpuKernels(library) if name == LIBRARY else GpuKernels(library)


def _taken(name: str) -> Kernels:
    kernels = _kernels(name)
    if isinstance(kernels, str):
        raise Refused(kernels)
    return kernels


def cpu_kernels() -> Kernels:
    """Raises Refused without a library."""
    return _taken(LIBRARY)


def gpu_kernels() -> Kernels:
    """Those of HIP where torch was built for it, else CUDA's. Raises Refused without a library."""
    return _taken(HIP_LIBRARY if torch.version.hip else CUDA_LIBRARY)


@cache
def is_hopper_or_newer(device: torch.device) -> bool:
    """Whether a GPU is NVIDIA's, of compute capability 9 or more: what some choices were measured on."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def forget() -> None:
    """Look for the libraries anew: for tests, and after `sd-ort build-ops` in the same process."""
    _found.cache_clear()
    _kernels.cache_clear()


class CpuKernels:
    """libsd_ort_ops.so, on torch's number of threads."""

    dtypes = frozenset({torch.float32, torch.float16})

    def __init__(self, library: CpuLibrary) -> None:
        self._library = library

    def run(self, name: str, params: ctypes.Structure, device: torch.device) -> None:
        try:
            self._library.run(name, params, _parallel_for(torch.get_num_threads()))
        except LookupError as error:
            raise Refused("the library has no such CPU kernel") from error
        except RuntimeError as error:
            raise Refused(str(error)) from error


@cache
def _parallel_for(threads: int) -> object | None:
    """A loop over so many threads as the library calls it, each an even share; None: all on the caller's."""
    if threads == 1:
        return None
    pool = ThreadPoolExecutor(threads - 1, thread_name_prefix="sd_ort")

    def share(body: Any, context: int, first: int, end: int) -> None:
        for i in range(first, end):
            body(context, i)

    def run(_: int, body: Any, count: int, context: int) -> None:
        shares = min(threads, count)
        bounds = [count * i // shares for i in range(shares + 1)] if shares else [0]
        others = [pool.submit(share, body, context, *bounds[i : i + 2]) for i in range(1, shares)]
        if shares:
            share(body, context, bounds[0], bounds[1])
        wait(others)

    return ParallelFor(run)


class GpuKernels:
    """libsd_ort_cuda.so or libsd_ort_hip.so, on torch's current stream, with scratch memory of torch's allocator."""

    dtypes = frozenset(NUMBERS)

    def __init__(self, library: GpuLibrary) -> None:
        self._library = library
        self._numbers: dict[str, int] = {}
        self._lock = threading.Lock()
        self.without_workspace = False  # level "memory": only candidates that want no scratch memory
        self._loaded = False
        self._tunes = False

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
        """As `run`, on the device that is current."""
        library = self._library
        self._load_tuning()
        try:
            number = self._numbers.get(name)
            if number is None:
                number = self._numbers[name] = library.operator(name, params)
            candidate = self._choose(number, params, stream)
            size = library.workspace_bytes(number, candidate, params)
            if size and self.without_workspace:
                candidate = self._without_workspace(number, params)
                size = 0
            workspace = torch.empty(size, dtype=torch.uint8, device=device) if size else None
            library.run(number, candidate, params, workspace.data_ptr() if workspace is not None else 0, stream)
        except LookupError as error:
            raise Refused("the library has no such kernel") from error
        except RuntimeError as error:
            raise Refused(str(error)) from error

    def _choose(self, number: int, params: ctypes.Structure, stream: int) -> int:
        """The tuned candidate or the default. Nothing is measured on a stream whose calls are being captured."""
        if not (self._tunes and torch.cuda.is_current_stream_capturing()):
            return self._library.choose(number, params, stream)
        self._library.c.sd_ort_enable_tuning(0)
        try:
            return self._library.choose(number, params, stream)
        finally:
            self._library.c.sd_ort_enable_tuning(1)

    def _without_workspace(self, number: int, params: ctypes.Structure) -> int:
        """The last candidate that takes the call and wants no scratch memory; the plainest wants none."""
        fitting = range(len(self._library.candidates(number)) - 1, -1, -1)
        for candidate in fitting:
            supported = self._library.is_supported(number, candidate, params)
            if supported and not self._library.workspace_bytes(number, candidate, params):
                return candidate
        raise Refused("every kernel for it wants scratch memory")

    def replace_memsets(self, graph: int) -> None:
        """Makes kernels of the memset nodes of a cudaGraph_t, before it is instantiated: each takes 3 us."""
        self._library.c.sd_ort_replace_memsets(graph)

    # ---- tuning: the files and the tuner that sessions use (sd_ort/runtime/tuning.py)

    def _load_tuning(self) -> None:
        """Takes the results of an earlier run on this machine, once."""
        if self._loaded:
            return
        with self._lock:
            if not self._loaded:
                tuning.load(None, tuning.GpuOps(self.path), _user())
                self._loaded = True

    @property
    def tunes(self) -> bool:
        """Whether every call of a new shape is measured, the vendor's library among the candidates."""
        return self._tunes

    def tune(self, on: bool) -> None:
        """From now on, measure every call of a new shape when it is first met; saved when the process ends."""
        if on and not self._tunes:
            atexit.register(self.save_tuning)
        self._tunes = on
        tuning.GpuOps(self.path).enable(on)

    def save_tuning(self) -> Path | None:
        """Writes what was measured to the file that later runs load; None when that is nothing."""
        return tuning.save([], tuning.GpuOps(self.path), _user())


def _user() -> str:
    """Who tuned, in the place of ONNX Runtime's version: products and attention are chosen beside torch's libraries."""
    return f"torch {torch.__version__}"
