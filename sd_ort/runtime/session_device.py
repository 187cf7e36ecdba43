"""Device of a pipeline's sessions, with their shared options, stream and lock."""

from __future__ import annotations

import math
import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from sd_ort.core.errors import ProviderError
from sd_ort.runtime.providers import PLUGIN, check_provider, provider_named
from sd_ort.runtime.session import SessionOptions
from sd_ort.runtime.stream import DeviceLock, Stream, open_stream
from sd_ort.runtime.updatable_weights import supports_in_place_update
from sd_ort.runtime.warm_up import warm_up


@dataclass(frozen=True)
class SessionDevice:
    """A provider with one device of it.

    On a GPU all sessions share `stream`, and `lock` is held while one of them runs: threads take turns. On a CPU there
    is no stream, and sessions run at once. `name`: "cpu", "cuda", or "cuda@1" for the second device. `options`: of the
    sessions, with the stream.
    """

    provider: str
    options: SessionOptions
    name: str
    stream: Stream | None
    lock: AbstractContextManager[Any]

    @classmethod
    def open(cls, provider: str, options: SessionOptions, *, captures: bool = False) -> SessionDevice:
        """Return the device that `options` name, the first without. `captures`: its provider must capture GPU graphs.

        Raises ProviderError for a provider that is not installed, or that cannot capture.
        """
        settings = dict(options.provider_options)
        device_id, handle = int(settings.get("device_id", 0)), settings.get("user_compute_stream")
        if not options.tuning:
            warm_up(provider, device_id)
        check_provider(provider, allow_fallback=options.allow_fallback)
        entry = provider_named(provider)
        if captures and entry.graph is None:
            raise ProviderError(f"the {provider} provider captures no graphs: leave graph capture off.")
        stream = open_stream(provider, device_id, None if handle is None else int(handle))
        if stream is not None:
            settings["user_compute_stream"] = str(stream.handle)
        name = entry.device if "user_compute_stream" in settings else "cpu"
        if name != "cpu" and device_id:
            name += f"@{device_id}"
        lock: AbstractContextManager[Any] = nullcontext() if name == "cpu" else threading.RLock()
        lock = lock if stream is None else DeviceLock(stream)
        return cls(provider, replace(options, provider_options=settings), name, stream, lock)

    def options_on(self, number: int) -> SessionOptions:
        """Return the options of sessions on device `number`. Raises ProviderError for a provider of one device."""
        if self.provider.startswith(PLUGIN) and provider_named(self.provider).vendor is None:
            raise ProviderError(f"{self.provider} drives one device: take a provider of sd-ort, cuda or rocm for two.")
        settings = {**self.options.provider_options, "device_id": str(number)}
        settings.pop("user_compute_stream", None)
        return replace(self.options, provider_options=settings)

    @property
    def capture_stream(self) -> Stream | None:
        """The stream on which `GpuGraph` captures runs; None if the provider captures its runs itself."""
        return self.stream if self.stream is not None and self.stream.has_graphs else None

    def free_bytes(self) -> float:
        """Return the free memory of the device; infinity for the CPU."""
        return math.inf if self.stream is None else self.stream.free_bytes()

    def activation_bytes(self, weights: int, arena_bytes: int = 0) -> float:
        """Return the memory that a call of a component can take: see `Components.activation_bytes`."""
        if self.stream is None:
            return math.inf
        if (limit := self.options.provider_options.get("memory_limit")) is not None:
            return min(self.free_bytes() + arena_bytes, int(limit) - weights)
        return self.free_bytes() + arena_bytes - (0 if arena_bytes else 2 * weights)

    def supports_in_place_update(self, operation: str = "MatMul") -> bool:
        """Return whether open sessions follow an update of a weight of this operation."""
        return supports_in_place_update(self.provider, self.name, self.options.provider_options, operation)
