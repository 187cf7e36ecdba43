"""The components of a pipeline folder, opened when they are first used; with little memory, one at a time."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from sd_ort.core.errors import InputError
from sd_ort.core.progress import announce
from sd_ort.runtime.bound_run import GpuGraphModel, report_failed_capture
from sd_ort.runtime.component_files import ComponentFiles
from sd_ort.runtime.glibc_malloc import disable_trim, retain_heap, return_heap, trim_heap
from sd_ort.runtime.op_library import op_library
from sd_ort.runtime.partitioned import Partition, PartitionedModel, PlacedPartition
from sd_ort.runtime.providers import is_plugin
from sd_ort.runtime.session import DEFAULT_OPTIONS, Model, ModelOverride, SessionOptions, create_session
from sd_ort.runtime.session_device import SessionDevice
from sd_ort.runtime.stream import Stream
from sd_ort.runtime.streamed import PinnedWeights, StreamedModel, StreamPlan, WeightStream
from sd_ort.runtime.updatable_weights import UpdatableWeights, update_callback
from sd_ort.runtime.weight_overrides import WeightOverrides

# Components of every step. With --low-memory they stay in memory together, and their runs are captured as GPU graphs.
# Measured on an H200, SD 1.5: the UNet gains 0.7 ms per step; the VAE nothing. A text encoder would gain 2 ms an image,
# but CLIP takes ArgMax of integers, which the CUDA provider leaves to the CPU.
STEP_COMPONENTS = frozenset({"unet", "transformer", "controlnet"})

Cut = Callable[[Path, int], Sequence[Partition]]  # cuts the graph at a path into a number of partitions


@dataclass(frozen=True)
class EditedGraph:
    """A serialized graph over a component's weights, and whether its runs are captured."""

    graph: bytes
    captured: bool


class Components(MutableMapping[str, Model]):
    """Name -> `Model` of a folder's components. A component that is assigned replaces the folder's.

    Sessions run on `target`, on the files of `files`, with the weights of `overrides`. `peers`: the same components on
    the other devices of one image; `placed`: components that run on other devices than the rest; `partitioned`: devices
    that each run a partition of a component's graph, and the function that cuts it.
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
        `others`: as in `ComponentFiles`.

        Raises InputError for a folder that holds no pipeline, ProviderError for a provider that is not installed, or
        that captures no graphs with `graph`.
        """
        self.files = ComponentFiles(folder, others)
        self.target = SessionDevice.open(provider, options, captures=bool(graph))
        self.overrides = WeightOverrides()
        self.low_memory = low_memory
        self.graph = graph
        self.opened: dict[str, Model] = {}
        self.edited_graphs: dict[str, EditedGraph] = {}  # by the key that `edit` returns
        self.closed: set[str] = set()  # closed when their weights were replaced: opened again together
        self.peers: list[Components] = []
        self.splits_image = False  # between its rows, too, and not only between the halves of guidance
        self.placed: dict[str, Components] = {}
        self.partitioned: dict[str, tuple[list[Components], Cut]] = {}
        self.streamed: dict[str, tuple[StreamPlan, Cut]] = {}
        self.pinned: dict[str, PinnedWeights] = {}

    @property
    def folder(self) -> Path:
        """The pipeline folder."""
        return self.files.folder

    @property
    def provider(self) -> str:
        """The name of the provider."""
        return self.target.provider

    @property
    def options(self) -> SessionOptions:
        """The options of the sessions, with the stream."""
        return self.target.options

    @property
    def device(self) -> str:
        """The name of the device."""
        return self.target.name

    @property
    def stream(self) -> Stream | None:
        """The stream of all sessions; None on a CPU."""
        return self.target.stream

    @property
    def lock(self) -> Any:
        """Held while a session runs."""
        return self.target.lock

    def activation_bytes(self, name: str, arena_bytes: int = 0) -> float:
        """Return the device memory that a call of an open component can take; infinity for the CPU.

        It is the free memory and, with the provider option memory_limit, at most the limit less the weights.
        `arena_bytes`: memory of earlier calls that the session reuses. Before the first call twice the weights are set
        aside, for transformed filters and workspaces.
        """
        if name in self.placed:
            return self.placed[name].activation_bytes(name, arena_bytes)
        return self.target.activation_bytes(self.files.weight_bytes(name), arena_bytes)

    def open_peers(self, device_ids: Sequence[int]) -> None:
        """Open the `peers` on devices `device_ids`. Raises as `_open_on_device`."""
        self.peers = [self._open_on_device(device_id) for device_id in device_ids]

    def run_on_device(self, name: str, number: int) -> None:
        """Run a component on device `number` from now on.

        Another thread may run it there while others run here. Raises as `_open_on_device`.
        """
        self.placed[name] = self._open_on_device(number)

    def partition_over(self, name: str, device_ids: Sequence[int], cut: Cut) -> None:
        """Run the partitions of a component's graph on this device and then on devices `device_ids`.

        `cut` returns the partitions. Raises as `_open_on_device`.
        """
        self.partitioned[name] = [self, *(self._open_on_device(device_id) for device_id in device_ids)], cut

    def stream_weights(self, name: str, cut: Cut) -> None:
        """Keep a component's weights in pinned host memory from now on, if they do not fit beside what a step computes.

        Only providers of sd-ort stream weights. Raises InputError if runs are to be captured.
        """
        stream, weights = self.stream, self.files.weight_bytes(name)
        if stream is None or stream.has_graphs:
            return
        budget = min(self.target.free_bytes(), float(self.options.provider_options.get("memory_limit", "inf")))
        plan = StreamPlan.of(weights, budget)
        if plan is None:
            return
        if self.graph:
            raise InputError(f"{name} is streamed from host memory, where no runs are captured: leave graph out.")
        self.streamed[name] = plan, cut
        announce(f"{name} does not fit in {budget / 1e9:.2f} GB of device memory: {plan.describe(weights)}.")

    def _open_on_device(self, number: int) -> Components:
        """Return the same components with the same weights on device `number`; on a CPU, with sessions of their own.

        Raises ProviderError for a missing device, or for a provider that supports only one device.
        """
        options = self.target.options_on(number)
        self.overrides.finish()
        peer = Components(self.folder, self.provider, options, graph=self.graph, others=self.files.others)
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
        return self.target.supports_in_place_update()

    @cached_property
    def transposed_operations(self) -> frozenset[str]:
        """Operations that read their weights in another layout than the graph's: these cannot be shared."""
        if self.device == "cpu" or is_plugin(self.provider):
            return frozenset()
        return frozenset() if self.target.supports_in_place_update("NhwcConv") else frozenset({"NhwcConv"})

    def require(self, *names: str) -> None:
        """Raise InputError as `ComponentFiles.require` does."""
        self.files.require(*names)

    def __getitem__(self, name: str) -> Model:
        if name in self.placed:
            return self.placed[name][name]
        if name in self.closed:
            self.open([name])
        if name not in self.opened:
            if name not in self.files.checked and name not in self.edited_graphs:
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
        """Open several components in parallel, with those whose weights are being replaced.

        Reading files takes most of the time. This thread opens the last one, the U-Net if there is one: only the main
        thread reuses memory that was freed (`retain_heap`). Raises the first exception of an opening.
        """
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
            edited = self.edited_graphs[name]
            override = replace(self.overrides.of(component), graph=edited.graph)
            if edited.captured:
                return self._open_captured(component, override)
            override = replace(override, shared=())
            # on a GPU the graph may compute weights from updatable ones, which must not be folded
            return Model(self._session(component, override, unfolded=self.device != "cpu"), self.lock)
        if partition is None and name in self.partitioned:
            return self._open_partitions(name)
        if name in self.streamed:
            return self._open_streamed(name)
        return self._open_captured(name, self.overrides.of(name, partition))

    def _open_captured(self, name: str, override: ModelOverride) -> Model:
        """Open a component; on a GPU as one whose runs are captured, if it is of every step and this can be."""
        if self.device != "cpu" and self.graph is not False and _kind(name) in STEP_COMPONENTS:
            try:
                session = self._session(name, override, capture=True)
                return GpuGraphModel(session, self.device, self.lock, self.target.capture_stream)
            except InputError as error:
                if self.graph:
                    raise
                report_failed_capture(error)
        return Model(self._session(name, override), self.lock)

    def _open_partitions(self, name: str) -> Model:
        self.overrides.finish()
        devices, cut = self.partitioned[name]
        placed = []
        for device, partition in zip(devices, cut(self.files.model(name), len(devices)), strict=True):
            device.overrides = replace(device.overrides, weights=self.overrides.weights)
            placed.append(PlacedPartition(device._open(name, partition), device.device, device.stream))
        return PartitionedModel(placed)

    def _open_streamed(self, name: str) -> Model:
        self.overrides.finish()
        assert self.stream is not None
        plan, cut = self.streamed[name]
        path = self.files.model(name)
        replaced = self.overrides.weights.get(name, {})
        if name not in self.pinned:
            self.pinned[name] = PinnedWeights(cut(path, plan.count), plan, path, replaced, self.stream)

        def opened(part: Partition, views: Mapping[str, Any], settings: Mapping[str, str]) -> Any:
            override = self.overrides.of(name, part)
            others = {key: value for key, value in override.weights.items() if key not in views}
            return self._session(name, replace(override, weights=others, updatable=views), settings=settings)

        limit = self.options.provider_options.get("memory_limit")
        return StreamedModel(
            WeightStream(self.pinned[name]), opened, self.device, self.lock, None if limit is None else int(limit)
        )

    def _refuse_streamed(self, name: str, label: str) -> None:
        if name in self.streamed:
            raise InputError(f"{name} is streamed from host memory, which {label} cannot: leave low_memory out.")

    def variant(self, name: str, label: str, make: Callable[[Path], bytes], *, captured: bool = False) -> Model:
        """Return a component with another graph over the component's own weights.

        `make` takes the path of the component's model and returns the graph. The session is cached under `label` until
        `drop_variants`. `captured`: runs are captured as GPU graphs, as those of the component.
        """
        key = f"{name} {label}"
        if key not in self.opened:
            self._refuse_streamed(name, label)
            self.require(name)
            override = self.overrides.of_graph(name, make(self.files.model(name)))
            model = self._open_captured(name, override) if captured else Model(self._session(name, override), self.lock)
            self.opened[key] = model
        return self.opened[key]

    def edit(self, name: str, label: str, make: Callable[[Path], bytes | None], *, captured: bool = False) -> str:
        """Register an edited graph over a component's own weights and return its key; `name` if `make` returns None.

        `make` and `captured` are those of `variant`. A captured graph computes no weights from updatable ones.

        For components that are too large to be open twice: opening one of the two closes the other.
        Raises InputError for a component that several devices share, and what `make` raises.
        """
        key = f"{name} {label}"
        if key not in self.edited_graphs:
            self._refuse_streamed(name, label)
            if name in self.partitioned:
                raise InputError(f"{name} runs on several devices, which {label} cannot: leave unet_on out.")
            self.require(name)
            graph = make(self.files.model(name))
            if graph is None:
                return name
            self.edited_graphs[key] = EditedGraph(graph, captured)
        return key

    def _replaces(self, name: str, other: str) -> bool:
        """Return whether opening `name` closes `other`: one is a component, the other its edited graph."""
        same = name != other and name.partition(" ")[0] == other.partition(" ")[0]
        return same and bool({name, other} & self.edited_graphs.keys())

    def drop_variants(self, name: str) -> None:
        """Close the variants of a component."""
        for key in [key for key in self.opened if key.startswith(f"{name} ")]:
            del self.opened[key]

    def _session(
        self,
        name: str,
        override: ModelOverride,
        capture: bool = False,
        unfolded: bool = False,
        settings: Mapping[str, str] | None = None,
    ) -> Any:
        """Open a session; `settings`: provider options over those of `options`."""
        # Packing the weights of a LoRA takes a text encoder longer than several runs gain.
        skip = bool(override.weights) and self.provider == "cpu" and _kind(name) not in STEP_COMPONENTS
        sizes = self.overrides.free_dimensions.get(name, {})
        options = replace(self.options, capture=capture, skip_optimization=skip or unfolded, free_dimensions=sizes)
        if settings:
            options = replace(options, provider_options={**options.provider_options, **settings})
        if override.weights and not override.shared:  # all are copied
            self.overrides.finish()
        session = create_session(self.files.model(name), self.provider, options, override, checked=True)
        self.overrides.finish()
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
        closed = self.overrides.assign(weights, shared, unfinished)
        for name in closed:
            self._close(name)
            self.pinned.pop(name, None)
        if self.peers:
            self.overrides.finish()
        for peer in self.peers:
            peer.replace_weights(weights, shared)
        return bool(closed)

    def release_replaced_weights(self) -> Mapping[str, Mapping[str, np.ndarray]]:
        """Return to the files' weights and close the sessions on others; return these, to be written over."""
        weights = self.overrides.weights
        self.replace_weights({})
        return weights

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
        return name in self.files.names or name in self.opened

    def __iter__(self) -> Iterator[str]:
        return iter(self.files.names)

    def __len__(self) -> int:
        return len(self.files.names)


def _kind(name: str) -> str:
    """Return the type of a component: controlnet_2 is a controlnet, an edited UNet a UNet."""
    return "controlnet" if name.startswith("controlnet_") else name.partition(" ")[0]
