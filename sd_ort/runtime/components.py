"""The components of a pipeline folder, opened when they are first used; with little memory, one at a time."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from sd_ort.core.errors import InputError, ProviderError
from sd_ort.core.pipeline_folder import MODEL, check_component, components
from sd_ort.runtime.bound_run import GpuGraphModel, report_failed_capture
from sd_ort.runtime.glibc_malloc import disable_trim, retain_heap, return_heap, trim_heap
from sd_ort.runtime.op_library import op_library
from sd_ort.runtime.partitioned import Partition, PartitionedModel, PlacedPartition
from sd_ort.runtime.providers import PLUGIN, check_provider, is_plugin, provider_named
from sd_ort.runtime.session import DEFAULT_OPTIONS, Model, ModelOverride, SessionOptions, create_session
from sd_ort.runtime.stream import DeviceLock, Stream, open_stream
from sd_ort.runtime.updatable_weights import UpdatableWeights, supports_in_place_update, update_callback
from sd_ort.runtime.warm_up import warm_up

# Components of every step. With --low-memory they stay in memory together, and their runs are captured as GPU graphs.
# Measured on an H200, SD 1.5: the UNet gains 0.7 ms per step; the VAE nothing. A text encoder would gain 2 ms an image,
# but CLIP takes ArgMax of integers, which the CUDA provider leaves to the CPU.
STEP_COMPONENTS = frozenset({"unet", "transformer", "controlnet"})


@dataclass(frozen=True)
class ComponentOverrides:
    """By component: what its sessions read instead of its files (`ModelOverride`), and sizes of symbolic dimensions."""

    weights: Mapping[str, Mapping[str, np.ndarray]] = field(default_factory=dict)
    shared: Mapping[str, Collection[str]] = field(default_factory=dict)
    updatable: dict[str, UpdatableWeights] = field(default_factory=dict)
    free_dimensions: dict[str, Mapping[str, int]] = field(default_factory=dict)

    def of(self, name: str, partition: Partition | None = None) -> ModelOverride:
        """Return the override of a component, or of a partition of its graph."""
        weights = self.weights.get(name, {})
        updatable = self.updatable[name].shared if name in self.updatable else {}
        if partition is None:
            return ModelOverride(weights, self.shared.get(name, ()), updatable)
        weights = {key: value for key, value in weights.items() if key in partition.weights}
        return ModelOverride(weights, updatable=updatable, graph=partition.graph)


class Components(MutableMapping[str, Model]):
    """Name -> `Model` of a folder's components. A component that is assigned replaces the folder's.

    On a GPU all sessions share `stream`, and `lock` is held while one of them runs: threads take turns. On a CPU there
    is no stream, and sessions run at once. `peers`: the same components on the other devices of one image; `placed`:
    components that run on other devices than the rest; `partitioned`: devices that each run a partition of a
    component's graph, and the function that cuts it.
    """

    def __init__(
        self,
        folder: Path,
        provider: str = "cpu",
        options: SessionOptions = DEFAULT_OPTIONS,
        *,
        low_memory: bool = False,
        graph: bool | None = None,
        others: Mapping[str, Path] | None = None,
    ) -> None:
        """Check the provider; sessions are opened when they are first used.

        `low_memory`: opening a component closes the others, apart from `STEP_COMPONENTS`. `graph`: capture runs of the
        components in `STEP_COMPONENTS` as GPU graphs; None to capture what the provider can, and to warn of the rest.
        `others`: ControlNets by name, each the component `controlnet` of another folder.

        Raises InputError for a folder that holds no pipeline, ProviderError for a provider that is not installed, or
        that captures no graphs with `graph`.
        """
        self.folder = folder
        self.others = dict(others or {})
        self.names = list(dict.fromkeys([*components(folder), *self.others]))
        self.provider = provider
        self.low_memory = low_memory
        self.graph = graph
        self.opened: dict[str, Model] = {}
        self.edited_graphs: dict[str, bytes] = {}  # by the key that `edit` returns
        self.captured_edits: set[str] = set()  # those of them whose runs are captured
        self.closed: set[str] = set()  # closed when their weights were replaced: opened again together
        self.checked: set[str] = set()
        self.overrides = ComponentOverrides()
        self.unfinished: Future[Any] | None = None  # writes shared weights that sessions read when they run
        settings = dict(options.provider_options)
        device_id, handle = int(settings.get("device_id", 0)), settings.get("user_compute_stream")
        if not options.tuning:
            warm_up(provider, device_id)
        check_provider(provider, allow_fallback=options.allow_fallback)
        entry = provider_named(provider)
        if graph and entry.graph is None:
            raise ProviderError(f"the {provider} provider captures no graphs: leave graph capture off.")
        self.stream = open_stream(provider, device_id, None if handle is None else int(handle))
        if self.stream is not None:
            settings["user_compute_stream"] = str(self.stream.handle)
        self.options = replace(options, provider_options=settings)
        self.device = entry.device if "user_compute_stream" in settings else "cpu"
        if self.device != "cpu" and device_id:
            self.device += f"@{device_id}"
        self.lock: Any = nullcontext() if self.device == "cpu" else threading.RLock()
        if self.stream is not None:
            self.lock = DeviceLock(self.stream)
        self.peers: list[Components] = []
        self.splits_image = False  # between its rows, too, and not only between the halves of guidance
        self.placed: dict[str, Components] = {}
        self.partitioned: dict[str, tuple[list[Components], Callable[[Path, int], Sequence[Partition]]]] = {}

    @property
    def capture_stream(self) -> Stream | None:
        """The stream on which `GpuGraph` captures runs; None if the provider captures its runs itself."""
        return self.stream if self.stream is not None and self.stream.has_graphs else None

    def free_bytes(self) -> float:
        """Return the free memory of the device; infinity for the CPU."""
        return math.inf if self.stream is None else self.stream.free_bytes()

    def activation_bytes(self, name: str, held: int = 0) -> float:
        """Return the device memory that a call of an open component can take; infinity for the CPU.

        It is the free memory and, with the provider option memory_limit, at most the limit less the weights. `held`:
        bytes that an earlier call took and that the session keeps for the next one. Before the first call twice the
        weights are set aside, for transformed filters and workspaces.
        """
        if name in self.placed:
            return self.placed[name].activation_bytes(name, held)
        if self.stream is None:
            return math.inf
        folder, component = self._folder_of(name)
        weights = sum(path.stat().st_size for path in (folder / component).iterdir() if path.is_file())
        if (limit := self.options.provider_options.get("memory_limit")) is not None:
            return min(self.free_bytes() + held, int(limit) - weights)
        return self.free_bytes() + held - (0 if held else 2 * weights)

    def open_peers(self, numbers: Sequence[int]) -> None:
        """Open the `peers` on devices `numbers`. Raises as `_open_on_device`."""
        self.peers = [self._open_on_device(number) for number in numbers]

    def run_on_device(self, name: str, number: int) -> None:
        """Run a component on device `number` from now on. Another thread may run it there while others run here.
        Raises as `_open_on_device`."""
        self.placed[name] = self._open_on_device(number)

    def partition_over(
        self, name: str, numbers: Sequence[int], cut: Callable[[Path, int], Sequence[Partition]]
    ) -> None:
        """Run the partitions of a component's graph that `cut` returns on this device and then on devices `numbers`.
        Raises as `_open_on_device`."""
        self.partitioned[name] = [self, *(self._open_on_device(number) for number in numbers)], cut

    def _open_on_device(self, number: int) -> Components:
        """The same components with the same weights on device `number`; on a CPU, sessions beside these. Raises
        ProviderError for a device that is not there, or a provider that drives one device."""
        if self.provider.startswith(PLUGIN) and provider_named(self.provider).vendor is None:
            raise ProviderError(f"{self.provider} drives one device: take a provider of sd-ort, cuda or rocm for two.")
        settings = {**self.options.provider_options, "device_id": str(number)}
        settings.pop("user_compute_stream", None)
        options = replace(self.options, provider_options=settings)
        self.finish_weights()
        peer = Components(self.folder, self.provider, options, graph=self.graph, others=self.others)
        peer.overrides = replace(self.overrides, updatable={})
        return peer

    @cached_property
    def in_place(self) -> bool:
        """Whether weights of open sessions can be updated (see `make_updatable`): on a GPU whose provider supports it.

        The CPU's kernels want prepacked weights: without, a step of SD 1.5 takes 1.07 times as long at 64 x 64 latents
        and 1.12 at 32 x 32. Without the op library, weights of `sd_ort`'s operators are folded into other constants.
        With `peers` or `partitioned` components, all open their sessions again.
        """
        if self.device == "cpu" or self.low_memory or self.peers or self.partitioned:
            return False
        if not is_plugin(self.provider) and op_library(self.options.library, self.provider) is None:
            return False
        return supports_in_place_update(self.provider, self.device, self.options.provider_options)

    @cached_property
    def transposed_operations(self) -> frozenset[str]:
        """Operations that read their weights in another layout than the graph's: these cannot be shared."""
        if self.device == "cpu" or is_plugin(self.provider):
            return frozenset()
        follows = supports_in_place_update(self.provider, self.device, self.options.provider_options, "NhwcConv")
        return frozenset() if follows else frozenset({"NhwcConv"})

    def require(self, *names: str) -> None:
        """Check that components are there and whole, before minutes go into the others. Raises InputError."""
        for name in names:
            if name not in self.names:
                raise InputError(
                    f"{self.folder} has no {name}: export the whole pipeline with `sd-ort export MODEL OUT`."
                )
            check_component(*self._folder_of(name))
            self.checked.add(name)

    def __getitem__(self, name: str) -> Model:
        if name in self.placed:
            return self.placed[name][name]
        if name in self.closed:
            self.open([name])
        if name not in self.opened:
            if name not in self.checked and name not in self.edited_graphs:
                self.require(name)
            for other in [other for other in self.opened if self._replaces(name, other)]:
                del self.opened[other]
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
        finds again what was freed (`retain_heap`). Raises what opening one of them raises."""
        every = sorted({*names, *self.closed}, key=lambda name: (_kind(name) in STEP_COMPONENTS, name))
        memory = nullcontext() if self.provider != "cpu" else retain_heap() if self.closed else return_heap()
        was_kept, self.closed = bool(self.closed), set()
        beside = [] if self.low_memory else every[:-1]
        with memory, ThreadPoolExecutor(max(1, len(beside))) as threads:
            opening = [threads.submit(self.__getitem__, name) for name in beside]
            for name in every[len(beside) :]:
                self[name]
            for opened in opening:
                opened.result()
        if was_kept and not self.overrides.weights:
            trim_heap()

    def _open(self, name: str, partition: Partition | None = None) -> Model:
        if name in self.edited_graphs:
            component = name.partition(" ")[0]
            override = replace(self.overrides.of(component), graph=self.edited_graphs[name])
            if name in self.captured_edits:
                return self._open_captured(component, override)
            override = replace(override, shared=())
            # on a GPU the graph may compute weights from updatable ones, which must not be folded
            return Model(self._session(component, override, unfolded=self.device != "cpu"), self.lock)
        if partition is None and name in self.partitioned:
            return self._open_partitions(name)
        return self._open_captured(name, self.overrides.of(name, partition))

    def _open_captured(self, name: str, override: ModelOverride) -> Model:
        """Open a component; on a GPU as one whose runs are captured, if it is of every step and this can be."""
        if self.device != "cpu" and self.graph is not False and _kind(name) in STEP_COMPONENTS:
            try:
                session = self._session(name, override, capture=True)
                return GpuGraphModel(session, self.device, self.lock, self.capture_stream)
            except InputError as error:
                if self.graph:
                    raise
                report_failed_capture(error)
        return Model(self._session(name, override), self.lock)

    def _open_partitions(self, name: str) -> Model:
        self.finish_weights()
        devices, cut = self.partitioned[name]
        folder, component = self._folder_of(name)
        placed = []
        for device, partition in zip(devices, cut(folder / component / MODEL, len(devices)), strict=True):
            device.overrides = replace(device.overrides, weights=self.overrides.weights)
            placed.append(PlacedPartition(device._open(name, partition), device.device, device.stream))
        return PartitionedModel(placed)

    def variant(self, name: str, label: str, make: Callable[[Path], bytes], *, captured: bool = False) -> Model:
        """A component with another graph over its own weights: `make` is given the path of its model and returns the
        graph. Cached under `label` until `drop_variants`. `captured`: its runs are captured as the component's are."""
        key = f"{name} {label}"
        if key not in self.opened:
            self.require(name)
            folder, component = self._folder_of(name)
            graph = make(folder / component / MODEL)
            override = _for_graph(replace(self.overrides.of(name), shared=()), graph)
            model = self._open_captured(name, override) if captured else Model(self._session(name, override), self.lock)
            self.opened[key] = model
        return self.opened[key]

    def edit(self, name: str, label: str, make: Callable[[Path], bytes | None], *, captured: bool = False) -> str:
        """Return the key of a component with another graph over its own weights, as `variant`; `name` if `make` returns
        None. A graph that is `captured` computes no weights from updatable ones.

        For components that are too large to be open twice: opening one of the two closes the other.
        Raises InputError for a component that several devices share, and what `make` raises.
        """
        key = f"{name} {label}"
        if key not in self.edited_graphs:
            if name in self.partitioned:
                raise InputError(f"{name} runs on several devices, which {label} cannot: leave unet_on out.")
            self.require(name)
            folder, component = self._folder_of(name)
            graph = make(folder / component / MODEL)
            if graph is None:
                return name
            self.edited_graphs[key] = graph
            if captured:
                self.captured_edits.add(key)
        return key

    def _replaces(self, name: str, other: str) -> bool:
        """Return whether opening `name` closes `other`: one of them is a component, the other an edited graph of it."""
        same = name != other and name.partition(" ")[0] == other.partition(" ")[0]
        return same and bool({name, other} & self.edited_graphs.keys())

    def drop_variants(self, name: str) -> None:
        """Close the variants of a component."""
        for key in [key for key in self.opened if key.startswith(f"{name} ")]:
            del self.opened[key]

    def _folder_of(self, name: str) -> tuple[Path, str]:
        """The folder of a component, and its name there."""
        return (self.others[name], "controlnet") if name in self.others else (self.folder, name)

    def _session(self, name: str, override: ModelOverride, capture: bool = False, unfolded: bool = False) -> Any:
        folder, component = self._folder_of(name)
        # Packing the weights of a LoRA takes a text encoder longer than several runs gain.
        skip = bool(override.weights) and self.provider == "cpu" and _kind(name) not in STEP_COMPONENTS
        sizes = self.overrides.free_dimensions.get(name, {})
        options = replace(self.options, capture=capture, skip_optimization=skip or unfolded, free_dimensions=sizes)
        if override.weights and not override.shared:  # all are copied
            self.finish_weights()
        session = create_session(folder / component / MODEL, self.provider, options, override, checked=True)
        self.finish_weights()
        return session

    def replace_weights(
        self,
        weights: Mapping[str, Mapping[str, np.ndarray]],
        shared: Mapping[str, Collection[str]] | None = None,
        unfinished: Future[Any] | None = None,
    ) -> bool:
        """Open components with these initializers (by component) instead of those in their files from now on.

        `shared`: by component, the initializers that sessions may read where they are. `unfinished`: writes values of
        shared initializers meanwhile, which no session reads while it is opened. Returns whether sessions were closed.
        """
        if self.unfinished is not None:
            wait([self.unfinished])
        new = {name: values for name, values in weights.items() if values}
        closed = {*self.overrides.weights, *new}
        for name in closed:
            self._close(name)
        self.overrides, self.unfinished = replace(self.overrides, weights=new, shared=dict(shared or {})), unfinished
        if self.peers:
            self.finish_weights()
        for peer in self.peers:
            peer.replace_weights(weights, shared)
        return bool(closed)

    def release_replaced_weights(self) -> Mapping[str, Mapping[str, np.ndarray]]:
        """Return to the files' weights and close the sessions on others; return these, to be written over."""
        weights = self.overrides.weights
        self.replace_weights({})
        return weights

    def finish_weights(self) -> None:
        """Wait until all values of replaced weights are written. Raises what computing them raised."""
        if (unfinished := self.unfinished) is not None:  # another thread may finish them too
            unfinished.result()
            self.unfinished = None

    def make_updatable(self, name: str, weights: Mapping[str, np.ndarray]) -> bool:
        """Have these initializers of a component in updatable memory from now on.

        Returns whether its session was closed, to be opened over that memory: not if it prefetched them there.
        """
        prefetched = getattr(getattr(self.opened.get(name), "session", None), "prefetched", None)
        if prefetched is not None and not weights.keys() <= prefetched.values.keys():
            prefetched = None
        if prefetched is None:
            self._close(name)
        callback = update_callback(self.provider)
        self.overrides.updatable[name] = UpdatableWeights(weights, self.device, callback, prefetched)
        return prefetched is None

    def _close(self, name: str) -> None:
        if name in self.opened and not self.low_memory:
            self.closed.add(name)
            if self.provider == "cpu":
                disable_trim()  # for the session that is opened next
        self.opened.pop(name, None)
        self.drop_variants(name)

    def __setitem__(self, name: str, model: Model) -> None:
        if (self.peers and _kind(name) in STEP_COMPONENTS) or name in self.partitioned:
            raise InputError(f"{name} is open on two devices: load the pipeline on one to replace it.")
        self.placed.pop(name, None)
        self.opened[name] = model

    def __delitem__(self, name: str) -> None:
        del self.opened[name]

    def __contains__(self, name: object) -> bool:
        return name in self.names or name in self.opened

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def _for_graph(override: ModelOverride, graph: bytes) -> ModelOverride:
    """Return an override with another graph, and only the weights that it has: ONNX Runtime refuses others."""
    if not override.weights and not override.updatable:
        return replace(override, graph=graph)
    import onnx

    names = {tensor.name for tensor in onnx.ModelProto.FromString(graph).graph.initializer}
    weights = {name: value for name, value in override.weights.items() if name in names}
    updatable = {name: value for name, value in override.updatable.items() if name in names}
    return replace(override, weights=weights, updatable=updatable, graph=graph)


def _kind(name: str) -> str:
    """Return the type of a component: controlnet_2 is a controlnet, an edited UNet a UNet."""
    return "controlnet" if name.startswith("controlnet_") else name.partition(" ")[0]
