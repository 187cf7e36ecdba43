"""The operator libraries through their C interface (interface.h), by ctypes: the only Python that calls them so.

`libsd_ort_cuda.so` or `libsd_ort_hip.so`, or in tests an emulation of one on the host, and `libsd_ort_ops.so` for CPUs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

_OP, _CANDIDATE, _POINTER, _TEXT = ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p
_Functions = Mapping[str, tuple[type | None, list[type]]]

# interface.h: result and arguments of each function, sd_ort_<name>.
_OF_BOTH: _Functions = {"interface_version": (ctypes.c_int, []), "build_hash": (_TEXT, [])}
_OF_GPUS: _Functions = {
    "op_count": (ctypes.c_int, []),
    "op_name": (_TEXT, [_OP]),
    "find_op": (_OP, [_TEXT, ctypes.c_size_t]),
    "candidate_count": (ctypes.c_int, [_OP]),
    "candidate_name": (_TEXT, [_OP, _CANDIDATE]),
    "is_supported": (ctypes.c_int, [_OP, _CANDIDATE, _POINTER]),
    "workspace_bytes": (ctypes.c_size_t, [_OP, _CANDIDATE, _POINTER]),
    "run": (_TEXT, [_OP, _CANDIDATE, _POINTER, _POINTER, _POINTER]),
    "default_candidate": (_CANDIDATE, [_OP, _POINTER]),
    "choose": (_CANDIDATE, [_OP, _POINTER, _POINTER]),
    "signature": (_TEXT, [_OP, _POINTER]),
    "enable_tuning": (None, [ctypes.c_int]),
    "tune": (_TEXT, [_OP, _POINTER, _POINTER]),
    "tuning_results": (_TEXT, []),
    "set_tuning_result": (ctypes.c_int, [_TEXT, _TEXT, _TEXT]),
    "clear_tuning_results": (None, []),
    "gpu_arch": (_TEXT, []),
    "gpu_versions": (_TEXT, []),
    "replace_memsets": (None, [_POINTER]),
}
# A thread pool as sd_ort_parallel_for: (pool, body, count, context) -> None.
ParallelFor = ctypes.CFUNCTYPE(
    None, _POINTER, ctypes.CFUNCTYPE(None, _POINTER, ctypes.c_size_t), ctypes.c_size_t, _POINTER
)
_OF_CPUS: _Functions = {
    "gpu_status": (_TEXT, []),
    "cpu_find_op": (_OP, [_TEXT, ctypes.c_size_t]),
    "cpu_run": (_TEXT, [_OP, _POINTER, ParallelFor, _POINTER]),
}


def _open(path: Path, functions: _Functions) -> ctypes.CDLL:
    """Raises OSError when the library cannot be loaded, AttributeError when it lacks a function."""
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in {**_OF_BOTH, **functions}.items():
        function = getattr(library, f"sd_ort_{name}")
        function.restype, function.argtypes = result, arguments
    return library


class CpuLibrary:
    """libsd_ort_ops.so: the CPU kernels without ONNX Runtime."""

    def __init__(self, path: Path) -> None:
        """Raises as GpuLibrary does."""
        self.path = path
        self.c = _open(path, _OF_CPUS)

    def run(self, name: str, params: ctypes.Structure, parallel_for: object = None) -> None:
        """Runs an operator on this thread, or on a ParallelFor.

        Raises LookupError when its name or the size of its Params is unknown, RuntimeError with the kernel's message.
        """
        number = int(self.c.sd_ort_cpu_find_op(name.encode(), ctypes.sizeof(params)))
        if number < 0:
            raise LookupError(f"{self.path} has no {name} with {ctypes.sizeof(params)} bytes of parameters")
        error = self.c.sd_ort_cpu_run(number, ctypes.addressof(params), parallel_for or ParallelFor(), None)
        if error is not None:
            raise RuntimeError(error.decode())


class GpuLibrary:
    """libsd_ort_hip.so or libsd_ort_cuda.so; `c.sd_ort_<name>` are all its functions."""

    def __init__(self, path: Path) -> None:
        """Raises OSError when the library cannot be loaded, AttributeError when it lacks a function."""
        self.path = path
        self.c = _open(path, _OF_GPUS)

    def operator(self, name: str, params: ctypes.Structure) -> int:
        """The operator's number. Raises LookupError when its name or the size of its Params is unknown."""
        number = int(self.c.sd_ort_find_op(name.encode(), ctypes.sizeof(params)))
        if number < 0:
            raise LookupError(f"{self.path} has no {name} with {ctypes.sizeof(params)} bytes of parameters")
        return number

    def candidates(self, operator: int) -> list[str]:
        count = self.c.sd_ort_candidate_count(operator)
        return [self.c.sd_ort_candidate_name(operator, i).decode() for i in range(count)]

    def is_supported(self, operator: int, candidate: int, params: ctypes.Structure) -> bool:
        return bool(self.c.sd_ort_is_supported(operator, candidate, ctypes.addressof(params)))

    def workspace_bytes(self, operator: int, candidate: int, params: ctypes.Structure) -> int:
        return int(self.c.sd_ort_workspace_bytes(operator, candidate, ctypes.addressof(params)))

    def default_candidate(self, operator: int, params: ctypes.Structure) -> int:
        """The candidate that runs a call which was never measured."""
        return int(self.c.sd_ort_default_candidate(operator, ctypes.addressof(params)))

    def choose(self, operator: int, params: ctypes.Structure, stream: int = 0) -> int:
        """The candidate to run: the tuned one, or the default."""
        return int(self.c.sd_ort_choose(operator, ctypes.addressof(params), stream))

    def run(self, operator: int, candidate: int, params: ctypes.Structure, workspace: int, stream: int = 0) -> None:
        """Launches. Raises RuntimeError with the library's message."""
        error = self.c.sd_ort_run(operator, candidate, ctypes.addressof(params), workspace, stream)
        if error is not None:
            raise RuntimeError(error.decode())

    def tune(self, operator: int, params: ctypes.Structure, stream: int = 0) -> None:
        """Measures the candidates of a call. Raises RuntimeError when candidate 0 fails."""
        error = self.c.sd_ort_tune(operator, ctypes.addressof(params), stream)
        if error is not None:
            raise RuntimeError(error.decode())

    def tuning_results(self) -> list[list[str]]:
        """Operator, signature, candidate, microseconds, the default's microseconds; of what was measured so far."""
        return [line.split("\t") for line in self.c.sd_ort_tuning_results().decode().splitlines()]
