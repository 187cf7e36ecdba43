"""Client of a HIP runtime by ctypes, for functions that run in a process of their own under scripts/amd/simulate."""

from __future__ import annotations

import ctypes
import importlib
import json
import sys
import threading
from collections.abc import Callable
from typing import Any

_GLOBAL, _THREAD_LOCAL, RELAXED = range(3)  # hipStreamCaptureMode
TO_DEVICE, TO_HOST, ON_DEVICE = 1, 2, 3  # hipMemcpyKind


class Hip:
    """Functions of libamdhip64.so. A call returns the name of its error: "hipSuccess"."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libamdhip64.so.7")
        self.library.hipGetErrorName.restype = ctypes.c_char_p

    def __getattr__(self, name: str) -> Callable[..., str]:
        function = getattr(self.library, name)

        def call(*arguments: object) -> str:
            status = function(*arguments)
            return str(self.library.hipGetErrorName(status).decode())

        return call

    def create(self, function: str, *arguments: object) -> ctypes.c_void_p:
        """Call a function whose first argument receives a handle or an address, and return that."""
        handle = ctypes.c_void_p()
        status = getattr(self, function)(ctypes.byref(handle), *arguments)
        assert status == "hipSuccess", f"{function}: {status}"
        return handle

    def allocate(self, count: int) -> ctypes.c_void_p:
        return self.create("hipMalloc", ctypes.c_size_t(count))

    def upload(self, values: ctypes.Array) -> ctypes.c_void_p:
        address = self.allocate(ctypes.sizeof(values))
        assert self.copy(address, values, ctypes.sizeof(values), TO_DEVICE) == "hipSuccess"
        return address

    def download(self, address: ctypes.c_void_p, values: ctypes.Array) -> list[Any]:
        assert self.copy(values, address, ctypes.sizeof(values), TO_HOST) == "hipSuccess"
        return list(values)

    def copy(self, destination: object, source: object, count: int, kind: int) -> str:
        return self.hipMemcpy(destination, source, ctypes.c_size_t(count), kind)

    def function(self, image: str, name: str) -> ctypes.c_void_p:
        """A kernel of a code object in a file."""
        module = self.create("hipModuleLoad", image.encode())
        return self.create("hipModuleGetFunction", module, name.encode())

    def launch(
        self, function: object, grid: tuple, block: tuple, *arguments: Any, lds: int = 0, stream: object = None
    ) -> str:
        addresses = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        return self.hipModuleLaunchKernel(function, *grid, *block, lds, stream, addresses, None)


def in_thread(function: Callable[[], Any]) -> Any:
    """The result of a function that another thread calls."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


if __name__ == "__main__":
    _, folder, module, function, *arguments = sys.argv
    sys.path.insert(0, folder)
    print(json.dumps(getattr(importlib.import_module(module), function)(Hip(), *arguments)))
