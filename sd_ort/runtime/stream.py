"""A GPU stream of our own, for all sessions of a pipeline: their runs follow each other without anyone waiting.

Made through the runtime library that ONNX Runtime's provider itself is linked to (libcudart or libamdhip64), or through
our own provider, so no framework for GPUs need be installed. Plain copies to and from the device wait for it.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from sd_ort.core.errors import ProviderError
from sd_ort.runtime.providers import is_plugin, missing_libraries, plugin_library, provider_named
from sd_ort.runtime.wheels import needed_libraries, runtime

# Runtime library -> prefix of its functions; cudaStream_t and hipStream_t are pointers, all functions return 0 or fail.
RUNTIMES = {"libcudart": "cuda", "libamdhip64": "hip"}


class Stream:
    """A stream and its events. It lives as long as the process: sessions that use it may outlive what opened it."""

    def __init__(self, library: str, prefix: str, device: int = 0) -> None:
        """`library`: file name of the runtime library. Raises ProviderError when it is not there or has no device."""
        try:
            self.c: Any = ctypes.CDLL(library)
        except OSError as error:
            raise ProviderError(f"{library} cannot be loaded: {error}.") from error
        self.prefix = prefix
        self._call("SetDevice", device)
        handle = ctypes.c_void_p()
        self._call("StreamCreate", ctypes.byref(handle))
        self.handle = int(handle.value or 0)
        self.events: list[ctypes.c_void_p] = []

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self.c, self.prefix + name)(*arguments):
            raise ProviderError(f"{self.prefix}{name} failed with error {code}: is the GPU visible (`sd-ort doctor`)?")

    def reserve(self, count: int) -> None:
        """Have `count` events ready."""
        while len(self.events) < count:
            event = ctypes.c_void_p()
            self._call("EventCreate", ctypes.byref(event))
            self.events.append(event)

    def record(self, number: int) -> None:
        """Mark with event `number` what is queued by now."""
        self._call("EventRecord", self.events[number], ctypes.c_void_p(self.handle))

    def wait(self, number: int) -> None:
        """Return when all is done that was queued before event `number`."""
        self._call("EventSynchronize", self.events[number])

    def seconds(self, first: int, last: int) -> float:
        """Time on the device between two events, both of them past."""
        milliseconds = ctypes.c_float()
        self._call("EventElapsedTime", ctypes.byref(milliseconds), self.events[first], self.events[last])
        return milliseconds.value / 1e3


def open_stream(provider: str, device: int = 0) -> Stream | None:
    """A stream for sessions of a provider; None for one that takes none, or that this machine cannot really use."""
    entry = provider_named(provider)
    if is_plugin(provider):
        return Stream(str(plugin_library(provider)), "sd_ort_", device) if entry.vendor else None
    if entry.graph is None or entry.library is None or entry.ep not in runtime().get_available_providers():
        return None
    if missing_libraries(provider):
        return None
    path = Path(runtime().__file__).parent / "capi" / entry.library
    if not path.is_file():
        return None
    for needed in needed_libraries(path):
        for name, prefix in RUNTIMES.items():
            if needed.startswith(name):
                return Stream(needed, prefix, device)
    return None
