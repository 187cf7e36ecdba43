"""Weights that sessions of a pipeline read instead of their files', by component."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sd_ort.runtime.partitioned import Partition
from sd_ort.runtime.session import ModelOverride
from sd_ort.runtime.updatable_weights import UpdatableWeights


@dataclass
class WeightOverrides:
    """Overrides by component: graphs and weights (`ModelOverride`), and sizes of symbolic dimensions.

    `unfinished`: writes values of `shared` weights, which sessions read when they run.
    """

    weights: Mapping[str, Mapping[str, np.ndarray]] = field(default_factory=dict)
    shared: Mapping[str, Collection[str]] = field(default_factory=dict)
    updatable: dict[str, UpdatableWeights] = field(default_factory=dict)
    free_dimensions: dict[str, Mapping[str, int]] = field(default_factory=dict)
    unfinished: Future[Any] | None = None

    def of(self, name: str, partition: Partition | None = None) -> ModelOverride:
        """Return the override of a component, or of a partition of its graph."""
        weights = self.weights.get(name, {})
        updatable = self.updatable[name].shared if name in self.updatable else {}
        if partition is None:
            return ModelOverride(weights, self.shared.get(name, ()), updatable)
        weights = {key: value for key, value in weights.items() if key in partition.weights}
        return ModelOverride(weights, updatable=updatable, graph=partition.graph)

    def of_graph(self, name: str, graph: bytes) -> ModelOverride:
        """Return the override for an edited graph of a component.

        It has only weights of which the graph has initializers: ONNX Runtime rejects others. None are shared, since an
        edited graph has other consumers.
        """
        override = replace(self.of(name), shared=(), graph=graph)
        if not override.weights and not override.updatable:
            return override
        import onnx

        names = {tensor.name for tensor in onnx.ModelProto.FromString(graph).graph.initializer}
        weights = {name: value for name, value in override.weights.items() if name in names}
        updatable = {name: value for name, value in override.updatable.items() if name in names}
        return replace(override, weights=weights, updatable=updatable)

    def assign(
        self,
        weights: Mapping[str, Mapping[str, np.ndarray]],
        shared: Mapping[str, Collection[str]] | None,
        unfinished: Future[Any] | None,
    ) -> set[str]:
        """Replace all weights but the updatable ones; return the components that had others or have them now."""
        if self.unfinished is not None:
            wait([self.unfinished])
        new = {name: values for name, values in weights.items() if values}
        changed = {*self.weights, *new}
        self.weights, self.shared, self.unfinished = new, dict(shared or {}), unfinished
        return changed

    def finish(self) -> None:
        """Wait until all values are written. Raises the exception of a failed computation."""
        if (unfinished := self.unfinished) is not None:  # another thread may finish them too
            unfinished.result()
            self.unfinished = None
