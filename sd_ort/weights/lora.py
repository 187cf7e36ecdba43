"""LoRA adapters of a loaded pipeline, added, scaled and removed while it is in use.

A LoRA adds scale * alpha / rank * up @ down to the weight of a module (Hu et al., 2021, section 4.1). `weights.updates`
applies these deltas to the initializers of open sessions. No file changes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from sd_ort.core.errors import InputError
from sd_ort.weights.lora_files import LoraAdapter, LowRankDelta
from sd_ort.weights.updates import WeightUpdater

log = logging.getLogger("sd_ort")


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
            InputError: if the adapter is for another model: no module matches, or a shape differs.
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
        except InputError:
            del self.adapters[name]
            raise
        if unmatched:
            first = ", ".join(unmatched[:5])
            log.warning("%s: %d parts are not applied, for this model lacks them: %s", label, len(unmatched), first)

    def deltas(self, adapter_scales: Mapping[str, float]) -> dict[str, dict[str, LowRankDelta]]:
        """Return the sum of the adapters' deltas at their scales, by component and checkpoint tensor."""
        total: dict[str, dict[str, LowRankDelta]] = {}
        for name, scale in adapter_scales.items():
            for component, modules in self.adapters[name].modules.items():
                tensors, deltas = self.modules(component), total.setdefault(component, {})
                for module, weights in modules.items():
                    if scale and (tensor := tensors.get(module)):
                        delta = weights.delta(scale)
                        deltas[tensor] = deltas[tensor] + delta if tensor in deltas else delta
        return total
