"""The components of a pipeline folder, opened when they are first used; with little memory, one at a time."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from sd_ort.core.errors import InputError, ProviderError
from sd_ort.core.pipeline_folder import MODEL, check_component, components
from sd_ort.runtime.bound_run import GpuGraphModel, report_failed_capture
from sd_ort.runtime.glibc_malloc import disable_trim, kept, return_heap, trim_heap
from sd_ort.runtime.op_library import op_library
from sd_ort.runtime.partitioned import Link, PartitionedModel, Range
from sd_ort.runtime.providers import check_provider, is_plugin, provider_named
from sd_ort.runtime.session import Model, create_session
from sd_ort.runtime.stream import DeviceLock, Stream, open_stream
from sd_ort.runtime.updatable_weights import UpdatableWeights, supports_in_place_update, update_callback

# Components that take turns at every step: with --low-memory they stay in memory together.
STEP_COMPONENTS = frozenset({"unet", "controlnet"})

# Components that are captured as graphs. Measured on an H200, SD 1.5: the UNet gains 0.7 ms per step; the VAE nothing.
# A text encoder would gain 2 ms an image, but CLIP takes ArgMax of integers, which the CUDA provider leaves to the CPU.
CAPTURED = frozenset({"unet", "controlnet"})


class Components(MutableMapping[str, Model]):
    """Name -> `Model` of a folder's components. A component that is assigned takes the place of the folder's.

    `low_memory`: opening one closes the others, so that one is in memory (see `STEP_COMPONENTS`). `graph`: capture runs
    of the components in `CAPTURED` as GPU graphs; None to capture what the provider can, and to warn of the rest.
    On a GPU all sessions share the stream `stream`, and `lock` is held while one of them runs: threads take turns. On
    a CPU there is no stream, and sessions run at once. `partner`: the same components on another device, if any;
    `elsewhere`: components that run on other devices than the rest; `spreads`: those of which each device runs a range
    of the graph, and how it is cut.
    """

    def __init__(
        self,
        folder: Path,
        provider: str = "cpu",
        *,
        low_memory: bool = False,
        graph: bool | None = None,
        others: Mapping[str, Path] | None = None,
        **session_options: Any,
    ) -> None:
        """`others`: ControlNets by name, each the component `controlnet` of another folder. `session_options`: those of
        `sd_ort.runtime.session.create_session`.

        Raises InputError for a folder that holds no pipeline, ProviderError for a provider that is not installed, or
        that captures no graphs with `graph`.
        """
        self.folder = folder
        self.others = dict(others or {})
        self.names = list(dict.fromkeys([*components(folder), *self.others]))
        self.provider = provider
        self.low_memory = low_memory
        self.options = session_options
        self.opened: dict[str, Model] = {}
        self.closed: set[str] = set()  # for their weights' sake: opened again together
        self.checked: set[str] = set()
        self.weights: dict[str, Mapping[str, np.ndarray]] = {}
        self.products: dict[str, Collection[str]] = {}
        self.held: dict[str, UpdatableWeights] = {}
        self.sizes: dict[str, Mapping[str, int]] = {}  # of open dimensions, by component
        check_provider(provider, allow_fallback=bool(session_options.get("allow_fallback")))
        entry = provider_named(provider)
        if graph and entry.graph is None:
            raise ProviderError(f"the {provider} provider captures no graphs: leave graph capture off.")
        given: dict[str, str] = dict(session_options.get("provider_options") or {})
        handle = int(given["user_compute_stream"]) if "user_compute_stream" in given else None
        self.stream = open_stream(provider, int(given.get("device_id", 0)), handle)
        if self.stream is not None:
            given["user_compute_stream"] = str(self.stream.handle)
        self.options["provider_options"] = given
        self.device = entry.device if self.stream is not None or "user_compute_stream" in given else "cpu"
        if self.device != "cpu" and (number := int(given.get("device_id", 0))):
            self.device += f"@{number}"
        self.graph = graph
        self.lock: Any = nullcontext() if self.device == "cpu" else threading.RLock()
        if self.stream is not None:
            self.lock = DeviceLock(self.stream)
        self.partner: Components | None = None
        self.elsewhere: dict[str, Components] = {}
        self.spreads: dict[str, tuple[list[Components], Callable[[Path, int], Sequence[Range]]]] = {}

    @property
    def capture_stream(self) -> Stream | None:
        """The stream on which `GpuGraph` captures runs; None if the provider captures its runs itself."""
        return self.stream if self.stream is not None and self.stream.has_graphs else None

    def free_bytes(self) -> float:
        """Return the free memory of the device; infinity for the CPU."""
        return math.inf if self.stream is None else self.stream.free_bytes()

    def open_guidance_peer(self, number: int) -> None:
        """Have a `partner` on device `number`. Raises as `_open_on_device`."""
        self.partner = self._open_on_device(number)

    def place(self, name: str, number: int) -> None:
        """Run a component on device `number` from now on. Another thread may run it there while others run here.
        Raises as `_open_on_device`."""
        self.elsewhere[name] = self._open_on_device(number)

    def spread(self, name: str, numbers: Sequence[int], cut: Callable[[Path, int], Sequence[Range]]) -> None:
        """Run ranges of a component's graph, as `cut` gives them, on this device and then on devices `numbers`.
        Raises as `_open_on_device`."""
        self.spreads[name] = [self, *(self._open_on_device(number) for number in numbers)], cut

    def _open_on_device(self, number: int) -> Components:
        """The same components with the same weights on device `number`; on a CPU, sessions beside these. Raises
        ProviderError for a device that is not there, or a provider that drives one device."""
        if is_plugin(self.provider):
            raise ProviderError(f"the {self.provider} provider drives one device: take cuda or rocm for two.")
        options = {**self.options["provider_options"], "device_id": str(number)}
        options.pop("user_compute_stream", None)
        session_options = {**self.options, "provider_options": options}
        made = Components(self.folder, self.provider, graph=self.graph, others=self.others, **session_options)
        made.weights, made.products, made.sizes = self.weights, self.products, self.sizes
        return made

    @cached_property
    def in_place(self) -> bool:
        """Whether weights can be changed under open sessions (see `hold`): on a GPU, where the provider does as told.

        A CPU's kernels want them packed: without, a step of SD 1.5 takes 1.07 times as long at 64 x 64 latents and 1.12
        at 32 x 32. And where a library is missing, what `sd_ort`'s operators read is folded into other constants. With
        a `partner` or `spreads` all open theirs anew.
        """
        if self.device == "cpu" or self.low_memory or self.partner is not None or self.spreads:
            return False
        if not is_plugin(self.provider) and op_library(self.options.get("library", True), self.provider) is None:
            return False
        return supports_in_place_update(self.provider, self.device, self.options["provider_options"])

    @cached_property
    def transposed_operations(self) -> frozenset[str]:
        """Operations that read their weights in another layout than the graph's: these cannot be shared."""
        options = self.options["provider_options"]
        if self.device == "cpu" or is_plugin(self.provider):
            return frozenset()
        follows = supports_in_place_update(self.provider, self.device, options, "NhwcConv")
        return frozenset() if follows else frozenset({"NhwcConv"})

    def require(self, *names: str) -> None:
        """Check that components are there and whole, before minutes go into the others. Raises InputError."""
        for name in names:
            if name not in self.names:
                raise InputError(
                    f"{self.folder} has no {name}: export the whole pipeline with `sd-ort export MODEL OUT`."
                )
            check_component(*self._place(name))
            self.checked.add(name)

    def __getitem__(self, name: str) -> Model:
        if name in self.elsewhere:
            return self.elsewhere[name][name]
        if name in self.closed:
            self.open([name])
        if name not in self.opened:
            if name not in self.checked:
                self.require(name)
            if self.low_memory:
                keep = _kind(name) in STEP_COMPONENTS
                for other in [other for other in self.opened if not (keep and _kind(other) in STEP_COMPONENTS)]:
                    del self.opened[other]
                gc.collect()
            self.opened[name] = self._open(name)
        return self.opened[name]

    def open(self, names: Sequence[str]) -> None:
        """Open components at once, and those that were closed for their weights' sake: most of that time each reads its
        own file. The last one, a U-Net where it is among them, is opened by this thread: of threads only the main one
        finds again what was freed (`kept`). Raises what opening one of them raises."""
        every = sorted({*names, *self.closed}, key=lambda name: (_kind(name) in STEP_COMPONENTS, name))
        memory = nullcontext() if self.provider != "cpu" else kept() if self.closed else return_heap()
        was_kept, self.closed = bool(self.closed), set()
        beside = [] if self.low_memory or is_plugin(self.provider) else every[:-1]
        with memory, ThreadPoolExecutor(max(1, len(beside))) as threads:
            opening = [threads.submit(self.__getitem__, name) for name in beside]
            for name in every[len(beside) :]:
                self[name]
            for opened in opening:
                opened.result()
        if was_kept and not self.weights:
            trim_heap()

    def _open(self, name: str, part: Range | None = None) -> Model:
        if part is None and name in self.spreads:
            return self._chained(name)
        if self.device != "cpu" and self.graph is not False and _kind(name) in CAPTURED:
            try:
                session = self._session(name, part, graph=True)
                return GpuGraphModel(session, self.device, self.lock, self.capture_stream)
            except InputError as error:
                if self.graph:
                    raise
                report_failed_capture(error)
        return Model(self._session(name, part), self.lock)

    def _chained(self, name: str) -> Model:
        every, cut = self.spreads[name]
        folder, component = self._place(name)
        links = []
        for each, part in zip(every, cut(folder / component / MODEL, len(every)), strict=True):
            each.weights = self.weights
            links.append(Link(each._open(name, part), each.device, each.stream))
        return PartitionedModel(links)

    def variant(self, name: str, label: str, make: Callable[[Path], bytes]) -> Model:
        """A component with a changed graph over its own weights: `make` is given the path of its model and returns the
        graph. Kept under `label` until `drop_variants`."""
        key = f"{name} {label}"
        if key not in self.opened:
            self.require(name)
            folder, component = self._place(name)
            graph = make(folder / component / MODEL)
            self.opened[key] = Model(self._session(name, changed=graph), self.lock)
        return self.opened[key]

    def drop_variants(self, name: str) -> None:
        """Close the changed forms of a component."""
        for key in [key for key in self.opened if key.startswith(f"{name} ")]:
            del self.opened[key]

    def _place(self, name: str) -> tuple[Path, str]:
        """The folder of a component, and its name there."""
        return (self.others[name], "controlnet") if name in self.others else (self.folder, name)

    def _session(self, name: str, part: Range | None = None, **more: Any) -> Any:
        folder, component = self._place(name)
        path, weights = folder / component / MODEL, self.weights.get(name)
        if part is not None:
            weights = {key: value for key, value in (weights or {}).items() if key in part.weights}
            more["changed"] = part.graph
        held = self.held[name].shared if name in self.held else None
        more |= {"sizes": self.sizes.get(name), "products": () if "changed" in more else self.products.get(name, ())}
        if weights and self.provider == "cpu" and _kind(name) not in STEP_COMPONENTS:
            more["once"] = True  # packing the weights of a LoRA takes a text encoder longer than several runs gain
        return create_session(path, self.provider, weights=weights, held=held, checked=True, **more, **self.options)

    def replace_weights(
        self, weights: Mapping[str, Mapping[str, np.ndarray]], products: Mapping[str, Collection[str]] | None = None
    ) -> bool:
        """From now on open components with these initializers (by component) instead of those in their files.

        `products`: by component, the initializers that nothing but matrix products reads.

        Returns whether sessions were closed for it.
        """
        new = {name: numbers for name, numbers in weights.items() if numbers}
        closed = {*self.weights, *new}
        for name in closed:
            self._close(name)
        self.weights, self.products = new, dict(products or {})
        if self.partner is not None:
            self.partner.replace_weights(weights, products)
        return bool(closed)

    def release_replaced_weights(self) -> Mapping[str, Mapping[str, np.ndarray]]:
        """The numbers that replace those of the files, which sessions opened from now on read again; those that read
        these are closed, so that other numbers can be written over them."""
        given_up = self.weights
        self.replace_weights({})
        return given_up

    def hold(self, name: str, weights: Mapping[str, np.ndarray]) -> bool:
        """Keep these initializers of a component in memory of ours from now on, to be changed under its open session.

        Returns whether its session was closed, to be opened over that memory: not if they were prefetched there.
        """
        prefetched = getattr(getattr(self.opened.get(name), "session", None), "prefetched", None)
        if prefetched is not None and not weights.keys() <= prefetched.values.keys():
            prefetched = None
        if prefetched is None:
            self._close(name)
        self.held[name] = UpdatableWeights(weights, self.device, update_callback(self.provider), prefetched)
        return prefetched is None

    def _close(self, name: str) -> None:
        if name in self.opened and not self.low_memory:
            self.closed.add(name)
            if self.provider == "cpu":
                disable_trim()  # for the session that is opened next
        self.opened.pop(name, None)
        self.drop_variants(name)

    def __setitem__(self, name: str, model: Model) -> None:
        if (self.partner is not None and _kind(name) in STEP_COMPONENTS) or name in self.spreads:
            raise InputError(f"{name} is open on two devices: load the pipeline on one to replace it.")
        self.elsewhere.pop(name, None)
        self.opened[name] = model

    def __delitem__(self, name: str) -> None:
        del self.opened[name]

    def __contains__(self, name: object) -> bool:
        return name in self.names or name in self.opened

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def _kind(name: str) -> str:
    """What a component is: controlnet_2 is a controlnet."""
    return "controlnet" if name.startswith("controlnet_") else name
