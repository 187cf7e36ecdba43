"""ctypes bindings of the C interface of the op libraries (interface.h).

GPU libraries are libsd_ort_cuda.so, libsd_ort_hip.so or, in tests, an emulation; libsd_ort_ops.so is for CPUs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

from custom_ops import rocm

_OP, _CANDIDATE, _POINTER, _TEXT = ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p
_Functions = Mapping[str, tuple[type | None, list[type]]]

# Result and argument types of the functions sd_ort_<name>.
_COMMON_FUNCTIONS: _Functions = {"interface_version": (ctypes.c_int, []), "build_hash": (_TEXT, [])}
_GPU_FUNCTIONS: _Functions = {
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
    "missing_runtime": (_TEXT, []),
    "runtime_path": (_TEXT, []),
    "multiplies_float8": (ctypes.c_int, []),
}
# A thread pool as sd_ort_parallel_for: (pool, body, count, context) -> None.
ParallelFor = ctypes.CFUNCTYPE(
    None, _POINTER, ctypes.CFUNCTYPE(None, _POINTER, ctypes.c_size_t), ctypes.c_size_t, _POINTER
)
_CPU_FUNCTIONS: _Functions = {
    "gpu_status": (_TEXT, []),
    "cpu_find_op": (_OP, [_TEXT, ctypes.c_size_t]),
    "cpu_run": (_TEXT, [_OP, _POINTER, ParallelFor, _POINTER]),
}


def _open(path: Path, functions: _Functions) -> ctypes.CDLL:
    """Load a library. Raises OSError if that fails, AttributeError if it lacks a function."""
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in {**_COMMON_FUNCTIONS, **functions}.items():
        function = getattr(library, f"sd_ort_{name}")
        function.restype, function.argtypes = result, arguments
    return library


class CpuLibrary:
    """libsd_ort_ops.so: the CPU kernels without ONNX Runtime."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if the library cannot be loaded, AttributeError if it lacks a function."""
        self.path = path
        self.c = _open(path, _CPU_FUNCTIONS)

    def run(self, name: str, params: ctypes.Structure, parallel_for: object = None) -> None:
        """Run an operator on this thread, or on a ParallelFor.

        Raises LookupError for an unknown name or size of Params, RuntimeError with the message of the kernel.
        """
        index = int(self.c.sd_ort_cpu_find_op(name.encode(), ctypes.sizeof(params)))
        if index < 0:
            raise LookupError(f"{self.path} has no {name} with {ctypes.sizeof(params)} bytes of parameters")
        error = self.c.sd_ort_cpu_run(index, ctypes.addressof(params), parallel_for or ParallelFor(), None)
        if error is not None:
            raise RuntimeError(error.decode())


class GpuLibrary:
    """libsd_ort_hip.so or libsd_ort_cuda.so; `c.sd_ort_<name>` are its functions."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if the library cannot be loaded, AttributeError if it lacks a function."""
        self.path = path
        if "hip" in path.name:
            rocm.load_pip_runtime()
        self.c = _open(path, _GPU_FUNCTIONS)

    def operator(self, name: str, params: ctypes.Structure) -> int:
        """Return the operator index. Raises LookupError for an unknown name or size of Params."""
        index = int(self.c.sd_ort_find_op(name.encode(), ctypes.sizeof(params)))
        if index < 0:
            raise LookupError(f"{self.path} has no {name} with {ctypes.sizeof(params)} bytes of parameters")
        return index

    def candidates(self, operator: int) -> list[str]:
        count = self.c.sd_ort_candidate_count(operator)
        return [self.c.sd_ort_candidate_name(operator, i).decode() for i in range(count)]

    def is_supported(self, operator: int, candidate: int, params: ctypes.Structure) -> bool:
        return bool(self.c.sd_ort_is_supported(operator, candidate, ctypes.addressof(params)))

    def workspace_bytes(self, operator: int, candidate: int, params: ctypes.Structure) -> int:
        return int(self.c.sd_ort_workspace_bytes(operator, candidate, ctypes.addressof(params)))

    def default_candidate(self, operator: int, params: ctypes.Structure) -> int:
        """Return the candidate for a call without a tuning result."""
        return int(self.c.sd_ort_default_candidate(operator, ctypes.addressof(params)))

    def choose(self, operator: int, params: ctypes.Structure, stream: int = 0) -> int:
        """Return the tuned or the default candidate."""
        return int(self.c.sd_ort_choose(operator, ctypes.addressof(params), stream))

    def run(self, operator: int, candidate: int, params: ctypes.Structure, workspace: int, stream: int = 0) -> None:
        """Launch a candidate. Raises RuntimeError with the message of the library."""
        error = self.c.sd_ort_run(operator, candidate, ctypes.addressof(params), workspace, stream)
        if error is not None:
            raise RuntimeError(error.decode())

    def tune(self, operator: int, params: ctypes.Structure, stream: int = 0) -> None:
        """Measure the candidates of a call. Raises RuntimeError if candidate 0 fails."""
        error = self.c.sd_ort_tune(operator, ctypes.addressof(params), stream)
        if error is not None:
            raise RuntimeError(error.decode())

    def tuning_results(self) -> list[list[str]]:
        """Return a list for each measured call: see `sd_ort_tuning_results` in interface.h."""
        return [line.split("\t") for line in self.c.sd_ort_tuning_results().decode().splitlines()]
