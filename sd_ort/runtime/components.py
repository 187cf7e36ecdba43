"""The components of a pipeline folder, opened when they are first used; with little memory, one at a time."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from sd_ort.core.errors import InputError
from sd_ort.runtime.component_files import ComponentFiles
from sd_ort.runtime.component_opener import ComponentOpener, Cut, EditedGraph, runs_every_step
from sd_ort.runtime.component_placement import ComponentPlacement
from sd_ort.runtime.glibc_malloc import disable_trim, retain_heap, return_heap, trim_heap
from sd_ort.runtime.op_library import op_library
from sd_ort.runtime.providers import is_plugin
from sd_ort.runtime.session import DEFAULT_OPTIONS, OrtModel, SessionOptions
from sd_ort.runtime.session_device import SessionDevice
from sd_ort.runtime.stream import Stream
from sd_ort.runtime.updatable_weights import UpdatableWeights, update_callback
from sd_ort.runtime.weight_overrides import WeightOverrides


class Components(MutableMapping[str, OrtModel]):
    """Name -> `Model` of a folder's components. A component that is assigned replaces the folder's.

    `opener` opens them on the pipeline's device; `placement` says which run elsewhere.
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

        `low_memory`: opening a component closes the others, apart from `STEP_COMPONENTS`. `graph`: as in
        `ComponentOpener`. `others`: as in `ComponentFiles`.

        Raises InputError for a folder that holds no pipeline, ProviderError for a provider that is not installed, or
        that captures no graphs with `graph`.
        """
        target = SessionDevice.open(provider, options, captures=bool(graph))
        self.opener = ComponentOpener(ComponentFiles(folder, others), target, graph)
        self.placement: ComponentPlacement[Components] = ComponentPlacement()
        self.low_memory = low_memory
        self.opened: dict[str, OrtModel] = {}
        self.edited_graphs: dict[str, EditedGraph] = {}  # by the key that `edit` returns
        self.closed: set[str] = set()  # closed when their weights were replaced: opened again together
        self._locks: dict[str, threading.RLock] = {}  # by component: only one thread opens its graphs

    @property
    def files(self) -> ComponentFiles:
        """Locations of the components' files."""
        return self.opener.files

    @property
    def target(self) -> SessionDevice:
        """The device of the sessions."""
        return self.opener.target

    @property
    def overrides(self) -> WeightOverrides:
        """Overrides of the components' files in sessions."""
        return self.opener.overrides

    @property
    def folder(self) -> Path:
        return self.files.folder

    @property
    def provider(self) -> str:
        return self.target.provider

    @property
    def options(self) -> SessionOptions:
        """The options of the sessions, with the stream."""
        return self.target.options

    @property
    def device(self) -> str:
        return self.target.name

    @property
    def stream(self) -> Stream | None:
        """The stream of all sessions; None on a CPU."""
        return self.target.stream

    @property
    def lock(self) -> Any:
        """Lock for runs of sessions."""
        return self.target.lock

    def activation_bytes(self, name: str, arena_bytes: int = 0) -> float:
        """Return the device memory that a call of an open component can take; infinity for the CPU.

        It is the free memory and, with the provider option memory_limit, at most the limit less the weights.
        `arena_bytes`: memory of earlier calls that the session reuses. Before the first call twice the weights are set
        aside, for transformed filters and workspaces.
        """
        if name in self.placement.placed:
            return self.placement.placed[name].activation_bytes(name, arena_bytes)
        return self.target.activation_bytes(self.files.weight_bytes(name), arena_bytes)

    def open_peers(self, device_ids: Sequence[int]) -> None:
        """Open the `peers` on devices `device_ids`. Raises as `_open_on_device`."""
        self.placement.peers = [self._open_on_device(device_id) for device_id in device_ids]

    def run_on_device(self, name: str, number: int) -> None:
        """Run a component on device `number` from now on.

        Another thread may run it there while others run here. Raises as `_open_on_device`.
        """
        self.placement.placed[name] = self._open_on_device(number)

    def partition_over(self, name: str, device_ids: Sequence[int], cut: Cut) -> None:
        """Run the partitions of a component's graph on this device and then on devices `device_ids`.

        `cut` returns the partitions. Raises as `_open_on_device`.
        """
        others = [self._open_on_device(device_id).opener for device_id in device_ids]
        self.placement.partitioned[name] = [self.opener, *others], cut

    def _open_on_device(self, number: int) -> Components:
        """Return the same components with the same weights on device `number`; on a CPU, with sessions of their own.

        Raises ProviderError for a missing device, or for a provider that supports only one device.
        """
        options = self.target.options_on(number)
        self.overrides.finish()
        peer = Components(self.folder, self.provider, options, graph=self.opener.graph, others=self.files.others)
        peer.opener.overrides = replace(self.overrides, updatable={})
        return peer

    @cached_property
    def in_place(self) -> bool:
        """Whether open sessions use weight updates (`make_updatable`): on a GPU whose provider supports it.

        The CPU's kernels want prepacked weights: without, a step of SD 1.5 takes 1.07 times as long at 64 x 64 latents
        and 1.12 at 32 x 32. Without the op library, weights of `sd_ort`'s operators are folded into other constants.
        If several devices compute one image, all open their sessions again.
        """
        if self.device == "cpu" or self.low_memory or self.placement.peers or self.placement.partitioned:
            return False
        if not is_plugin(self.provider) and op_library(self.options.library, self.provider) is None:
            return False
        return self.target.supports_in_place_update()

    @cached_property
    def transposed_operations(self) -> frozenset[str]:
        """Operations whose kernels read weights in another layout than the graph's. Such weights are not shared."""
        if self.device == "cpu" or is_plugin(self.provider):
            return frozenset()
        return frozenset() if self.target.supports_in_place_update("NhwcConv") else frozenset({"NhwcConv"})

    def require(self, *names: str) -> None:
        """Raise InputError as `ComponentFiles.require` does."""
        self.files.require(*names)

    def __getitem__(self, name: str) -> OrtModel:
        if name in self.placement.placed:
            return self.placement.placed[name][name]
        if name in self.closed:
            self.open([name])
        with self._opening(name):
            model = self.opened.get(name)
            if model is None:
                if name not in self.files.checked and name not in self.edited_graphs:
                    self.require(name)
                self._close_for(name)
                model = self.opened[name] = self._open(name)
            return model

    def _opening(self, name: str) -> threading.RLock:
        """Return the lock of a component and its edited graphs."""
        return self._locks.setdefault(name.partition(" ")[0], threading.RLock())

    def _close_for(self, name: str) -> None:
        """Close what opening `name` replaces, and with `low_memory` all that the same step does not run."""
        for other in list(self.opened):
            stays = not self.low_memory or (runs_every_step(name) and runs_every_step(other))
            if self._replaces(name, other) or not stays:
                self.opened.pop(other, None)  # another thread may have closed it
        if self.low_memory:
            gc.collect()

    def open(self, names: Sequence[str]) -> None:
        """Open several components in parallel, and the closed ones with them.

        Reading files takes most of the time. This thread opens the last one, the U-Net if there is one: only the main
        thread reuses memory that was freed (`retain_heap`). Raises the first exception of an opening.
        """
        every = sorted({*names, *self.closed}, key=lambda name: (runs_every_step(name), name))
        memory = nullcontext() if self.provider != "cpu" else retain_heap() if self.closed else return_heap()
        had_closed, self.closed = bool(self.closed), set()
        concurrent = [] if self.low_memory else every[:-1]
        with memory, ThreadPoolExecutor(max(1, len(concurrent))) as threads:
            opening = [threads.submit(self.__getitem__, name) for name in concurrent]
            for name in every[len(concurrent) :]:
                self[name]
            for opened in opening:
                opened.result()
        if had_closed and not self.overrides.weights:
            trim_heap()

    def _open(self, name: str) -> OrtModel:
        if name in self.edited_graphs:
            return self.opener.open_edited(name.partition(" ")[0], self.edited_graphs[name])
        if name in self.placement.partitioned:
            return self.placement.open_partitions(name, self.opener)
        return self.opener.open_streamed(name) if name in self.opener.plans else self.opener.open(name)

    def _reject_streamed(self, name: str, label: str) -> None:
        if name in self.opener.plans:
            raise InputError(f"{name} is streamed from host memory, which {label} cannot: leave low_memory out.")

    def variant(self, name: str, label: str, make: Callable[[Path], bytes], *, captured: bool = False) -> OrtModel:
        """Return a component with another graph over the component's own weights.

        `make` takes the path of the component's model and returns the graph. The session is cached under `label` until
        `drop_variants`. `captured`: runs are captured as GPU graphs, as those of the component.
        """
        key = f"{name} {label}"
        with self._opening(name):
            model = self.opened.get(key)
            if model is None:
                self._reject_streamed(name, label)
                self.require(name)
                override = self.overrides.of_graph(name, make(self.files.model(name)))
                model = (self.opener.open if captured else self.opener.open_uncaptured)(name, override)
                self.opened[key] = model
            return model

    def edit(self, name: str, label: str, make: Callable[[Path], bytes | None], *, captured: bool = False) -> str:
        """Register an edited graph over a component's own weights and return its key; `name` if `make` returns None.

        `make` and `captured` are those of `variant`. A captured graph computes no weights from updatable ones.

        For components that are too large to be open twice: opening one of the two closes the other.
        Raises InputError for a component that several devices share, and what `make` raises.
        """
        key = f"{name} {label}"
        if key not in self.edited_graphs:
            self._reject_streamed(name, label)
            if name in self.placement.partitioned:
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
        for key in list(self.opened):
            if key.startswith(f"{name} "):
                self.opened.pop(key, None)

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
            self.opener.discard_pinned(name)
        if self.placement.peers:
            self.overrides.finish()
        for peer in self.placement.peers:
            peer.replace_weights(weights, shared)
        return bool(closed)

    def release_replaced_weights(self) -> Mapping[str, Mapping[str, np.ndarray]]:
        """Return to the files' weights, close the sessions on others, and return these arrays to be overwritten."""
        weights = self.overrides.weights
        self.replace_weights({})
        return weights

    def make_updatable(self, name: str, weights: Mapping[str, np.ndarray]) -> bool:
        """Move these initializers of a component to updatable memory.

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

    def __setitem__(self, name: str, model: OrtModel) -> None:
        self.placement.check_assignable(name)
        self.placement.placed.pop(name, None)
        self.opened[name] = model

    def __delitem__(self, name: str) -> None:
        del self.opened[name]

    def __contains__(self, name: object) -> bool:
        return name in self.files.names or name in self.opened

    def __iter__(self) -> Iterator[str]:
        return iter(self.files.names)

    def __len__(self) -> int:
        return len(self.files.names)
