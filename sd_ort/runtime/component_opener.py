"""Open sessions of a pipeline's components on one device: unchanged graphs, edited graphs, and streamed weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sd_ort.core.errors import InputError
from sd_ort.core.progress import announce
from sd_ort.runtime.bound_run import GpuGraphModel, report_failed_capture
from sd_ort.runtime.component_files import ComponentFiles
from sd_ort.runtime.partitioned import Partition
from sd_ort.runtime.session import ModelOverride, OrtModel, create_session
from sd_ort.runtime.session_device import SessionDevice
from sd_ort.runtime.streamed import PinnedWeights, StreamedModel, StreamPlan, WeightStream
from sd_ort.runtime.weight_overrides import WeightOverrides

# Components of every step. With --low-memory they stay in memory together, and their runs are captured as GPU graphs.
# Measured on an H200, SD 1.5: the UNet gains 0.7 ms per step; the VAE nothing. A text encoder would gain 2 ms an image,
# but CLIP takes ArgMax of integers, which the CUDA provider leaves to the CPU.
STEP_COMPONENTS = frozenset({"unet", "transformer", "controlnet"})

Cut = Callable[[Path, int], Sequence[Partition]]  # cuts the graph at a path into a number of partitions


def runs_every_step(name: str) -> bool:
    """Return whether a component is in `STEP_COMPONENTS`: controlnet_2 is a controlnet, an edited UNet a UNet."""
    return ("controlnet" if name.startswith("controlnet_") else name.partition(" ")[0]) in STEP_COMPONENTS


@dataclass(frozen=True)
class EditedGraph:
    """A serialized graph over a component's weights, and whether its runs are captured."""

    graph: bytes
    captured: bool


@dataclass
class ComponentOpener:
    """Opens components on `target`, from `files`, with the weights of `overrides`.

    `graph`: capture runs of the components in `STEP_COMPONENTS` as GPU graphs; None to capture what the provider can,
    and to warn of the rest. `plans`: of streamed components.
    """

    files: ComponentFiles
    target: SessionDevice
    graph: bool | None = None
    overrides: WeightOverrides = field(default_factory=WeightOverrides)
    plans: dict[str, tuple[StreamPlan, Cut]] = field(default_factory=dict)
    _pinned: dict[str, PinnedWeights] = field(default_factory=dict)

    def open(self, name: str, override: ModelOverride | None = None) -> OrtModel:
        """Open a component. On a GPU, runs are captured if the component runs in each step and supports this."""
        override = self.overrides.of(name) if override is None else override
        if self.target.name != "cpu" and self.graph is not False and runs_every_step(name):
            try:
                session = self.session(name, override, capture=True)
                return GpuGraphModel(session, self.target.name, self.target.lock, self.target.capture_stream)
            except InputError as error:
                if self.graph:
                    raise
                model = self.open_uncaptured(name, override)  # raises what has nothing to do with graphs
                report_failed_capture(error)
                return model
        return self.open_uncaptured(name, override)

    def open_uncaptured(self, name: str, override: ModelOverride, unfolded: bool = False) -> OrtModel:
        """Open a component without GPU graphs."""
        return OrtModel(self.session(name, override, unfolded=unfolded), self.target.lock)

    def open_edited(self, name: str, edited: EditedGraph) -> OrtModel:
        override = replace(self.overrides.of(name), graph=edited.graph)
        if edited.captured:
            return self.open(name, override)
        # on a GPU the graph may compute weights from updatable ones, which must not be folded
        return self.open_uncaptured(name, replace(override, shared=()), unfolded=self.target.name != "cpu")

    def session(
        self,
        name: str,
        override: ModelOverride,
        capture: bool = False,
        unfolded: bool = False,
        settings: Mapping[str, str] | None = None,
    ) -> Any:
        """Open a session; `settings`: provider options over those of the device."""
        # Packing the weights of a LoRA takes a text encoder longer than several runs gain.
        skip = bool(override.weights) and self.target.provider == "cpu" and not runs_every_step(name)
        sizes = self.overrides.free_dimensions.get(name, {})
        skip = skip or unfolded
        options = replace(self.target.options, capture=capture, skip_optimization=skip, free_dimensions=sizes)
        if settings:
            options = replace(options, provider_options={**options.provider_options, **settings})
        if override.weights and not override.shared:  # all are copied
            self.overrides.finish()
        session = create_session(self.files.model(name), self.target.provider, options, override, checked=True)
        self.overrides.finish()
        return session

    # --- Weights in host memory -------------------------------------------------------------------------------------

    def plan_stream(self, name: str, cut: Cut) -> None:
        """Plan to stream a component's weights from pinned host memory if device memory does not suffice for a step.

        Only providers of sd-ort stream weights. Raises InputError if runs are to be captured.
        """
        stream, weights = self.target.stream, self.files.weight_bytes(name)
        if stream is None or stream.has_graphs:
            return
        budget = min(self.target.free_bytes(), float(self.target.options.provider_options.get("memory_limit", "inf")))
        plan = StreamPlan.of(weights, budget)
        if plan is None:
            return
        if self.graph:
            raise InputError(f"{name} is streamed from host memory, where no runs are captured: leave graph out.")
        self.plans[name] = plan, cut
        announce(f"{name} does not fit in {budget / 1e9:.2f} GB of device memory: {plan.describe(weights)}.")

    def open_streamed(self, name: str) -> OrtModel:
        """Open a component of `plans`."""
        self.overrides.finish()
        assert self.target.stream is not None
        plan, cut = self.plans[name]
        path = self.files.model(name)
        replaced = self.overrides.weights.get(name, {})
        if name not in self._pinned:
            self._pinned[name] = PinnedWeights(cut(path, plan.count), plan, path, replaced, self.target.stream)

        def opened(part: Partition, views: Mapping[str, Any], settings: Mapping[str, str]) -> Any:
            override = self.overrides.of(name, part)
            others = {key: value for key, value in override.weights.items() if key not in views}
            return self.session(name, replace(override, weights=others, updatable=views), settings=settings)

        limit = self.target.options.provider_options.get("memory_limit")
        weights = WeightStream(self._pinned[name])
        return StreamedModel(weights, opened, self.target.name, self.target.lock, None if limit is None else int(limit))

    def discard_pinned(self, name: str) -> None:
        """Release a component's pinned weights, which were replaced."""
        self._pinned.pop(name, None)
