"""LoRA adapters of a loaded pipeline, added, scaled and removed while it is in use.

An adapter adds a delta (`weights.deltas`) to the weight, and maybe the bias, of a module. `weights.updates` applies
these deltas to the initializers of open sessions. No file changes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from sd_ort.core.errors import InputError
from sd_ort.weights.deltas import Delta, add_deltas
from sd_ort.weights.lora_files import LoraAdapter, LoraModule
from sd_ort.weights.updates import WeightUpdater

log = logging.getLogger("sd_ort")

# An adapter's scale in a component: one number, or numbers by the start of a module's name, 1 for other modules.
ComponentScale = float | Mapping[str, float]
AdapterScale = float | Mapping[str, ComponentScale]  # of all components, or of those given


class LoraManager(WeightUpdater):
    """The LoRA adapters of one pipeline folder by name, and their deltas at given scales."""

    def __init__(self, folder: Path) -> None:
        """Raises InputError if the manifest of the folder has no weight recipes."""
        super().__init__(folder)
        self.adapters: dict[str, LoraAdapter] = {}

    def add(self, name: str, adapter: LoraAdapter, label: str) -> None:
        """Add an adapter; tensors of modules that the model lacks are ignored with a warning.

        `label`: the adapter's name in messages.

        Raises:
            InputError: if the adapter is for another model (no module matches, or a shape differs), if its tensors do
                not fit together, or if it changes a bias that the model lacks. It is not added then.
        """
        unmatched, matched = list(adapter.unmatched), 0
        for component, modules in adapter.modules.items():
            tensors = self.modules(component)
            unmatched += [f"{component}.{module}" for module in modules if module not in tensors]
            matched += sum(module in tensors for module in modules)
        if not matched:
            raise InputError(f"{label} is a LoRA of another family: none of its {len(unmatched)} modules is here.")
        if name in self.adapters:
            raise InputError(f"a LoRA named {name!r} is loaded already: give another adapter_name.")
        self.adapters[name] = adapter
        try:
            self.check(self.deltas({name: 1.0}))
        except BaseException:
            del self.adapters[name]
            raise
        if unmatched:
            first = ", ".join(unmatched[:5])
            log.warning(
                "%s: %d parts are not applied: incomplete, or not in this model: %s", label, len(unmatched), first
            )

    def deltas(self, adapter_scales: Mapping[str, AdapterScale]) -> dict[str, dict[str, Delta]]:
        """Return the sum of the adapters' deltas at their scales, by component and checkpoint tensor."""
        total: dict[str, dict[str, Delta]] = {}
        for name, scale in adapter_scales.items():
            for component, modules in self.adapters[name].modules.items():
                component_scale = scale.get(component, 0.0) if isinstance(scale, Mapping) else scale
                if component not in self.recipes or (isinstance(scale, Mapping) and component not in scale):
                    continue
                tensors, deltas = self.modules(component), total.setdefault(component, {})
                for module, weights in modules.items():
                    if tensor := tensors.get(module):
                        module_scale = scale_of_module(component_scale, module)
                        earlier = None if weights.scales_dora_norm else deltas.get(tensor)
                        for each, delta in self._module_deltas(component, tensor, weights, module_scale, earlier):
                            deltas[each] = add_deltas(deltas[each], delta) if each in deltas else delta
        return total

    def _module_deltas(
        self, component: str, tensor: str, module: LoraModule, scale: float, earlier: Delta | None
    ) -> list[tuple[str, Delta]]:
        """Return the deltas of a module's weight `tensor` and bias, by tensor; none if they are zero.

        `earlier`: the delta that DoRA's weight has already.
        """

        def weight() -> np.ndarray:
            source = self.source(component, tensor)
            return source if earlier is None else source + earlier.dense().reshape(source.shape)

        if scale == 0 and not module.is_dora:
            return []
        bias = tensor.removesuffix("weight") + "bias"
        shape = self.source_shape(component, tensor)
        try:
            delta, bias_delta = module.delta(scale, shape), module.bias_delta(scale)
            if delta is not None and module.is_dora:
                delta = module.delta(scale, shape, weight)
        except (ValueError, IndexError) as error:
            raise InputError(f"the LoRA's tensors of {tensor} do not fit together ({error}): get it again.") from error
        if bias_delta is not None and not self.initializers_of(component, bias):
            raise InputError(f"the LoRA changes {bias}, which the graph lacks: use it in diffusers.")
        return [(name, each) for name, each in ((tensor, delta), (bias, bias_delta)) if each is not None]


def scale_of_module(scale: ComponentScale, module: str) -> float:
    """Return the scale of a module (with underscores) within a component."""
    if not isinstance(scale, Mapping):
        return scale
    return next((value for prefix, value in scale.items() if module.startswith(prefix)), 1.0)
