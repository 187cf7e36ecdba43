"""Buffers in host or device memory between guard bytes, for kernel checks."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from custom_ops import rocm
from custom_ops.operator_spec import Array

# Guard bytes before and after every buffer, which detect out-of-bounds writes. 0 is for a memory checker, which also
# detects reads outside of the allocation.
GUARD_BYTES = 256
_PATTERN = 0xA5


class Memory(Protocol):
    """Memory for kernel buffers."""

    guard_bytes: int

    def upload(self, data: Array) -> Buffer:
        """Copy bytes (uint8) to a new buffer."""

    def synchronize(self) -> None:
        """Wait for the kernels. Raises RuntimeError if one failed."""


class Buffer(Protocol):
    """A buffer of a Memory."""

    @property
    def address(self) -> int: ...

    def download(self) -> Array:
        """Return the bytes of the buffer."""


class HostMemory:
    """Host memory, for the kernel emulator."""

    guard_bytes = GUARD_BYTES

    def upload(self, data: Array) -> _HostBuffer:
        raw = np.empty(data.size + 64, np.uint8)
        start = -raw.ctypes.data % 64
        raw[start : start + data.size] = data
        return _HostBuffer(raw[start : start + data.size])

    def synchronize(self) -> None:
        pass


@dataclass
class _HostBuffer:
    bytes: Array

    @property
    def address(self) -> int:
        return int(self.bytes.ctypes.data)

    def download(self) -> Array:
        return self.bytes


class DeviceMemory:
    """GPU memory of the CUDA or HIP runtime."""

    def __init__(self, guard_bytes: int = GUARD_BYTES) -> None:
        """Use the first runtime that has a device. Raises RuntimeError if none has."""
        self.guard_bytes = guard_bytes
        for prefix, names in (
            ("cuda", ("libcudart.so", "libcudart.so.13", "libcudart.so.12")),
            ("hip", rocm.runtime_names()),
        ):
            for name in (*names, f"/usr/local/cuda/lib64/{names[0]}"):
                try:
                    self._runtime, self._prefix = ctypes.CDLL(name), prefix
                except OSError:
                    continue
                if getattr(self._runtime, f"{prefix}GetDeviceCount")(ctypes.byref(ctypes.c_int())) == 0:
                    return
        raise RuntimeError("No CUDA or HIP runtime library with a device was found.")

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of the runtime. Raises RuntimeError with the error code."""
        error = getattr(self._runtime, self._prefix + name)(*arguments)
        if error != 0:
            raise RuntimeError(f"{self._prefix}{name} failed with error {error}")

    def upload(self, data: Array) -> _DeviceBuffer:
        return _DeviceBuffer(self, data)

    def synchronize(self) -> None:
        self.call("DeviceSynchronize")


class _DeviceBuffer:
    def __init__(self, memory: DeviceMemory, data: Array) -> None:
        self._memory, self._size = memory, data.size
        self._pointer = ctypes.c_void_p()
        memory.call("Malloc", ctypes.byref(self._pointer), ctypes.c_size_t(max(data.size, 1)))
        self._copy(self._pointer, ctypes.c_void_p(data.ctypes.data), 1)

    def _copy(self, to: ctypes.c_void_p, source: ctypes.c_void_p, direction: int) -> None:
        self._memory.call("Memcpy", to, source, ctypes.c_size_t(self._size), ctypes.c_int(direction))

    def __del__(self) -> None:
        self._memory.call("Free", self._pointer)

    @property
    def address(self) -> int:
        return self._pointer.value or 0

    def download(self) -> Array:
        data = np.empty(self._size, np.uint8)
        self._copy(ctypes.c_void_p(data.ctypes.data), self._pointer, 2)
        return data


class Guarded:
    """An array between guard bytes, `shift` bytes off 16-byte alignment."""

    def __init__(self, memory: Memory, data: Array, shift: int = 0) -> None:
        self.shape, self.dtype, self.begin = data.shape, data.dtype, memory.guard_bytes + shift
        raw = np.full(self.begin + data.nbytes + memory.guard_bytes, _PATTERN, np.uint8)
        raw[self.begin : self.begin + data.nbytes] = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
        self.size = data.nbytes
        self.buffer = memory.upload(raw)

    @property
    def address(self) -> int:
        return self.buffer.address + self.begin

    def read(self) -> tuple[Array, bool]:
        """Return the array and whether the guard bytes are intact."""
        raw = self.buffer.download()
        intact = (raw[: self.begin] == _PATTERN).all() and (raw[self.begin + self.size :] == _PATTERN).all()
        return raw[self.begin : self.begin + self.size].copy().view(self.dtype).reshape(self.shape), bool(intact)
