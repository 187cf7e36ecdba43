"""A model's weights on the device of our own provider, read while ONNX Runtime prepares the session that takes them.

ONNX Runtime maps, copies and unmaps one tensor after another, once all else is done. Here the provider's library reads
the whole data file into one block of the device with threads of its own, meanwhile the graph is parsed and optimized,
and the session is given views of the block (`AddInitializer`).
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sd_ort.core.errors import InputError
from sd_ort.core.paths import inside
from sd_ort.core.pipeline_folder import DATA
from sd_ort.runtime.ort_values import place, view
from sd_ort.runtime.providers import log, plugin_library, provider_named

if TYPE_CHECKING:
    import onnx

MIN_FILE = 1 << 24  # bytes; smaller ones are not worth it
MOST = 0.8  # of a data file that must be weights which are taken
MIN_TENSOR = 1 << 10  # bytes; what a kernel may want on the host, as scales of a Resize, is smaller
ALIGNMENT = 256  # bytes that the device's own blocks have, and vectorized kernels count on
ELEMENTS = {1: 4, 10: 2, 16: 2}  # bytes of onnx.TensorProto's float32, float16 and bfloat16

T = TypeVar("T")


class DeviceWeights:
    """The data file beside a model. `values`: initializer -> OrtValue over its place, once `take` was called. The
    memory goes with this object: see `sd_ort.runtime.ort_values.keep`."""

    def __init__(self, library: Path, device: str, file: Path) -> None:
        """Begins to read `file` onto a device, "gpu:VENDOR@NUMBER". Raises MemoryError where it has no room."""
        self.handle = ctypes.c_void_p()
        self.c: Any = ctypes.CDLL(str(library))
        self.c.sd_ort_WeightsAddress.restype = ctypes.c_void_p
        self.device, self.file, self.size = device, file, file.stat().st_size
        self.values: dict[str, Any] = {}
        number, path = place(device)["device_id"], os.fsencode(file)
        if self.c.sd_ort_WeightsRead(ctypes.byref(self.handle), number, path, ctypes.c_uint64(self.size)):
            raise MemoryError

    def __del__(self) -> None:
        if self.handle:
            self.c.sd_ort_WeightsRelease(self.handle)

    @property
    def option(self) -> dict[str, str]:
        """By which the provider knows them: it refuses a graph that would read one of them on the host."""
        return {"weights": str(self.handle.value)}

    def take(self, model: Path, without: Collection[str]) -> bool:
        """Make `values` of the floating weights of `model`, a checked file, `without` these names. Returns whether that
        is most of the data file."""
        import onnx

        graph = onnx.ModelProto.FromString(model.read_bytes()).graph
        skipped = {*without, *(value.name for value in (*graph.input, *graph.output))}
        taken = 0
        for tensor in graph.initializer:
            places = {entry.key: entry.value for entry in tensor.external_data}
            offset, size = int(places.get("offset", 0)), int(places.get("length", 0))
            wanted = tensor.data_type in ELEMENTS and size >= MIN_TENSOR and offset % ALIGNMENT == 0
            if wanted and places.get("location") == DATA and tensor.name not in skipped:
                self.values[tensor.name] = self._view(tensor, offset)
                taken += size
        return taken > MOST * self.size

    def _view(self, tensor: onnx.TensorProto, offset: int) -> Any:
        size = math.prod(tensor.dims) * ELEMENTS[tensor.data_type]
        found = self.c.sd_ort_WeightsAddress(
            self.handle, tensor.name.encode(), ctypes.c_uint64(offset), ctypes.c_uint64(size)
        )
        if not found:
            raise InputError(f"{self.file} changed while it was read: try again.")
        return view(self.device, found, tensor.data_type, tensor.dims)

    def _refusal(self) -> str:
        reason = ctypes.create_string_buffer(500)
        self.c.sd_ort_WeightsRejected(self.handle, reason, len(reason))
        return reason.value.decode(errors="replace")

    def opened(self, opened: Callable[[DeviceWeights | None], T]) -> T:
        """The session that `opened` makes with these weights once all are there, or without where the provider refuses
        them. Raises InputError when the file could not be read."""
        try:
            session = opened(self)
        except Exception:
            if not self._refusal():
                raise
        if reason := self._refusal():
            log.info("ONNX Runtime reads the weights itself: %s.", reason)
            return opened(None)
        if self.c.sd_ort_WeightsWait(self.handle):
            raise InputError(f"{self.file} cannot be read, or the device failed: try again.")
        return session


def begin(
    provider: str, options: Mapping[str, str], model: Path, without: Collection[str] = ()
) -> DeviceWeights | None:
    """The weights of `model`, a checked file, on their way to the device, `without` these names.

    `options`: the provider's. None where there are none worth it, the device has no room, or memory is limited: a limit
    counts what ONNX Runtime asks for.
    """
    file = model.parent / DATA
    number = options.get("device_id", "0")
    if "memory_limit" in options or not number.isdigit() or not file.is_file() or file.stat().st_size < MIN_FILE:
        return None
    try:
        device = f"{provider_named(provider).device}@{number}"
        made = DeviceWeights(plugin_library(provider), device, inside(file, model.parent))
    except MemoryError:
        return None
    return made if made.take(model, without) else None
