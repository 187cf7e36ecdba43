"""Prefetch of a model's weights to the device of the sd-ort provider, while ONNX Runtime prepares the session.

ONNX Runtime maps, copies and unmaps one tensor after another, after everything else. Here the provider's library reads
the data file into one block of device memory with its own threads, while the graph is parsed and optimized. The session
gets views of the block (`AddInitializer`).
"""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from sd_ort.core.cache import cached_bytes
from sd_ort.core.errors import InputError
from sd_ort.core.paths import inside
from sd_ort.core.pipeline_folder import DATA
from sd_ort.runtime.ort_values import device_arguments, value_at
from sd_ort.runtime.providers import log, plugin_library, provider_named

MIN_FILE = 1 << 24  # bytes; smaller files are not prefetched
MIN_SHARE = 0.8  # of a data file that must be prefetched weights
MIN_TENSOR = 1 << 10  # bytes; tensors that a kernel may read on the host, as scales of a Resize, are smaller
ALIGNMENT = 256  # bytes: that of the device's own blocks, which vectorized kernels require
ELEMENTS = {1: 4, 10: 2, 16: 2}  # bytes of onnx.TensorProto's float32, float16 and bfloat16

T = TypeVar("T")


class PrefetchedWeights:
    """The data file of a model in device memory, which this object owns: see `sd_ort.runtime.ort_values.keep_alive`.

    `values`: OrtValue views by initializer, after `add_views`.
    """

    def __init__(self, library: Path, device: str, file: Path) -> None:
        """Begin to read `file` to a device, "gpu:VENDOR@NUMBER". Raises MemoryError if its memory is full."""
        self.handle = ctypes.c_void_p()
        self.c: Any = ctypes.CDLL(str(library))
        self.c.sd_ort_WeightsAddress.restype = ctypes.c_void_p
        self.device, self.file, self.size = device, file, file.stat().st_size
        self.values: dict[str, Any] = {}
        number, path = device_arguments(device)["device_id"], os.fsencode(file)
        if self.c.sd_ort_WeightsRead(ctypes.byref(self.handle), number, path, ctypes.c_uint64(self.size)):
            raise MemoryError

    def __del__(self) -> None:
        if self.handle:
            self.c.sd_ort_WeightsRelease(self.handle)

    @property
    def option(self) -> dict[str, str]:
        """Return the provider option that names the weights: the provider rejects graphs that read one on the host."""
        return {"weights": str(self.handle.value)}

    def add_views(self, model: Path, without: Collection[str]) -> bool:
        """Fill `values` with the floating-point weights of `model`, a checked file, `without` these names.

        Returns whether they are most of the data file.
        """
        skipped, prefetched = set(without), 0
        for name, dtype, shape, offset, size in data_weights(model.read_bytes()):
            if dtype in ELEMENTS and size >= MIN_TENSOR and offset % ALIGNMENT == 0 and name not in skipped:
                self.values[name] = self._view(name, dtype, shape, offset)
                prefetched += size
        return prefetched > MIN_SHARE * self.size

    def _view(self, name: str, dtype: int, shape: list[int], offset: int) -> Any:
        size = math.prod(shape) * ELEMENTS[dtype]
        address = self.c.sd_ort_WeightsAddress(
            self.handle, name.encode(), ctypes.c_uint64(offset), ctypes.c_uint64(size)
        )
        if not address:
            raise InputError(f"{self.file} changed while it was read: try again.")
        return value_at(self.device, address, dtype, shape)

    def _rejection(self) -> str:
        reason = ctypes.create_string_buffer(500)
        self.c.sd_ort_WeightsRejected(self.handle, reason, len(reason))
        return reason.value.decode(errors="replace")

    def open_session(self, open_with: Callable[[PrefetchedWeights | None], T]) -> T:
        """Return the session of `open_with` with these weights, once all of them are read.

        Without them if the provider rejects them. Raises InputError if the file cannot be read.
        """
        try:
            session = open_with(self)
        except Exception:
            if not self._rejection():
                raise
        if reason := self._rejection():
            log.info("ONNX Runtime reads the weights itself: %s.", reason)
            return open_with(None)
        if self.c.sd_ort_WeightsWait(self.handle):
            raise InputError(f"{self.file} cannot be read, or the device failed: try again.")
        return session


def data_weights(model: bytes) -> list[tuple[str, int, list[int], int, int]]:
    """Return name, type, shape, offset and size of each weight in `DATA` that is neither an input nor an output.

    Cached, so that onnx is imported for a new model only.
    """

    def read() -> bytes:
        import onnx

        graph = onnx.ModelProto.FromString(model).graph
        skipped = {value.name for value in (*graph.input, *graph.output)}
        weights = []
        for tensor in graph.initializer:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            if entries.get("location") == DATA and tensor.name not in skipped:
                span = int(entries.get("offset", 0)), int(entries.get("length", 0))
                weights.append((tensor.name, tensor.data_type, list(tensor.dims), *span))
        return json.dumps(weights).encode()

    return json.loads(cached_bytes("weights", model, read))


def start_prefetch(
    provider: str, options: Mapping[str, str], model: Path, without: Collection[str] = ()
) -> PrefetchedWeights | None:
    """Begin to prefetch the weights of `model`, a checked file, `without` these names.

    `options`: the provider's. Returns None for small files, if the device's memory is full, and with a memory limit,
    which only counts what ONNX Runtime allocates.
    """
    file = model.parent / DATA
    number = options.get("device_id", "0")
    if "memory_limit" in options or not number.isdigit() or not file.is_file() or file.stat().st_size < MIN_FILE:
        return None
    try:
        device = f"{provider_named(provider).device}@{number}"
        weights = PrefetchedWeights(plugin_library(provider), device, inside(file, model.parent))
    except MemoryError:
        return None
    return weights if weights.add_views(model, without) else None
