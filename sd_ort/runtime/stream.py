"""GPU stream that all sessions of a pipeline share: their runs are queued in order, without host synchronization.

Made through the runtime library that ONNX Runtime's provider itself is linked to (libcudart or libamdhip64), or through
our own provider, so no framework for GPUs need be installed. Plain copies to and from the device wait for it, if it is
the thread's current device (`DeviceLock`).
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import Any

from sd_ort.core.errors import ProviderError
from sd_ort.runtime.ort_wheel import import_onnxruntime, needed_libraries
from sd_ort.runtime.providers import is_plugin, missing_libraries, plugin_library, provider_named, wheel_library

# Runtime library -> prefix of its functions; cudaStream_t and hipStream_t are pointers, all functions return 0 or fail.
RUNTIMES = {"libcudart": "cuda", "libamdhip64": "hip"}
NO_DEVICE = 100  # hipErrorNoDevice and cudaErrorNoDevice


class Stream:
    """A stream and its events. It lives as long as the process: sessions that use it may outlive what opened it."""

    def __init__(self, library: str, prefix: str, device: int = 0, handle: int | None = None) -> None:
        """`library`: file name of the runtime library. `handle`: an existing stream, None for a new one.

        Raises ProviderError if the library or the device does not exist.
        """
        try:
            self.c: Any = ctypes.CDLL(library)
        except OSError as error:
            raise ProviderError(f"{library} cannot be loaded: {error}.") from error
        self.prefix, self.device = prefix, device
        self._check_device()
        self.set_device()
        self.handle = self._create() if handle is None else handle
        self.events: list[ctypes.c_void_p] = []

    def _create(self) -> int:
        handle = ctypes.c_void_p()
        self.call("StreamCreate", ctypes.byref(handle))
        return int(handle.value or 0)

    @property
    def has_graphs(self) -> bool:
        """Whether the runtime library captures the stream; the sd-ort provider captures its runs itself."""
        return self.prefix in RUNTIMES.values()

    def c_function(self, name: str) -> Any:
        """Return a function of the runtime library by its name without the prefix."""
        return getattr(self.c, self.prefix + name)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the runtime library. Raises ProviderError if it fails."""
        if code := self.c_function(name)(*arguments):
            raise ProviderError(f"{self.prefix}{name} failed with error {code}: is the GPU visible (`sd-ort doctor`)?")

    def _check_device(self) -> None:
        """Raise ProviderError for a device that is not there."""
        count = ctypes.c_int(0)
        if hasattr(self.c, self.prefix + "GetDeviceCount"):
            if getattr(self.c, f"{self.prefix}GetDeviceCount")(ctypes.byref(count)) == NO_DEVICE:
                raise ProviderError("no GPU is visible: check its driver, and who may open /dev/kfd or /dev/nvidia0.")
            self.call("GetDeviceCount", ctypes.byref(count))
            if self.device >= count.value:
                gpus = f"{count.value} GPU{'s' if count.value != 1 else ''}"
                raise ProviderError(f"GPU {self.device} is not there: this machine shows {gpus}, counted from 0.")

    def set_device(self) -> None:
        """Make its device this thread's current one."""
        self.call("SetDevice", self.device)

    def synchronize(self) -> None:
        """Return when all work is done that was enqueued before."""
        self.call("StreamSynchronize", ctypes.c_void_p(self.handle))

    def free_bytes(self) -> int:
        """Return the free memory of its device."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.set_device()
        self.call("MemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def event(self) -> ctypes.c_void_p:
        """A new event, which may be recorded again and again."""
        self.set_device()
        event = ctypes.c_void_p()
        self.call("EventCreate", ctypes.byref(event))
        return event

    def record_event(self, event: ctypes.c_void_p) -> None:
        """Record an event of this stream: it stands for what is queued by now."""
        self.call("EventRecord", event, ctypes.c_void_p(self.handle))

    def wait_event(self, event: ctypes.c_void_p) -> None:
        """Let later work of this stream wait on the device for `event` of another stream, as last recorded.

        An event that was never recorded has no effect.
        """
        self.call("StreamWaitEvent", ctypes.c_void_p(self.handle), event, ctypes.c_uint(0))

    def copy_to_peer(self, source: int, other: Stream, target: int, size: int) -> None:
        """Queue a copy of `size` bytes from an address on this device to one on the device of `other`."""
        _reach(self, other)
        to, from_, queue = (ctypes.c_void_p(pointer) for pointer in (target, source, self.handle))
        self.call("MemcpyPeerAsync", to, other.device, from_, self.device, ctypes.c_size_t(size), queue)

    def reserve(self, count: int) -> None:
        """Have `count` events ready."""
        while len(self.events) < count:
            self.events.append(self.event())

    def record(self, number: int) -> None:
        """Mark with event `number` what is queued by now."""
        self.record_event(self.events[number])

    def wait(self, number: int) -> None:
        """Return when all is done that was queued before event `number`."""
        self.call("EventSynchronize", self.events[number])

    def seconds(self, first: int, last: int) -> float:
        """Time on the device between two events, both of them past."""
        milliseconds = ctypes.c_float()
        self.call("EventElapsedTime", ctypes.byref(milliseconds), self.events[first], self.events[last])
        return milliseconds.value / 1e3


class DeviceLock:
    """A lock for threads that share a stream; while it is held, the stream's device is the thread's current one."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self._lock = stream, threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()
        self.stream.set_device()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@cache
def _reach(stream: Stream, other: Stream) -> None:
    """Let the device of `stream` write to that of `other` directly, where it can; else copies go through the host."""
    stream.set_device()
    can = ctypes.c_int(0)
    stream.call("DeviceCanAccessPeer", ctypes.byref(can), stream.device, other.device)
    if can.value:
        getattr(stream.c, stream.prefix + "DeviceEnablePeerAccess")(other.device, 0)  # an error: it is enabled already
        getattr(stream.c, stream.prefix + "GetLastError")()  # which would be taken for that of a kernel


def open_stream(provider: str, device: int = 0, handle: int | None = None) -> Stream | None:
    """A stream for sessions of a provider; None for one that takes none, or that this machine cannot really use.

    `handle`: an existing stream of the device, None for a new one.
    """
    entry = provider_named(provider)
    if is_plugin(provider):
        return Stream(str(plugin_library(provider)), "sd_ort_", device, handle) if entry.vendor else None
    if entry.graph is None or entry.library is None or entry.ep not in import_onnxruntime().get_available_providers():
        return None
    if missing_libraries(provider):
        return None
    path = wheel_library(entry)
    if path is None:
        return None
    for needed in needed_libraries(path):
        for name, prefix in RUNTIMES.items():
            if needed.startswith(name):
                return Stream(needed, prefix, device, handle)
    return None
