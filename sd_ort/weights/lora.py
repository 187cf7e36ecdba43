"""The LoRAs of a loaded pipeline: small corrections of weights, added, weighed and taken off while it runs.

A LoRA says of a module: weight += strength * alpha / rank * up @ down (Hu et al., 2021, section 4.1). What that makes
of the weights of an optimized graph, and how it gets into open sessions, is in `pipeline.corrections`. No file changes,
and without a LoRA the weights are those on disk again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from sd_ort.core.errors import InputError
from sd_ort.weights.lora_files import Adapter, LowRank
from sd_ort.weights.updates import Corrections

log = logging.getLogger("sd_ort")


class Loras(Corrections):
    """The LoRAs of one pipeline folder, and what they change at given strengths."""

    def __init__(self, folder: Path) -> None:
        """Raises InputError for a folder whose manifest does not say where its weights come from."""
        super().__init__(folder)
        self.adapters: dict[str, Adapter] = {}

    def add(self, name: str, adapter: Adapter, described: str) -> None:
        """Keep an adapter under `name`; warns of what it has for modules that are not there.

        Raises InputError when it is for another model: nothing fits, or a shape differs.
        """
        unknown = list(adapter.left)
        fitting = 0
        for component, modules in adapter.modules.items():
            known = self.modules(component)
            unknown += [f"{component}.{module}" for module in modules if module not in known]
            fitting += sum(module in known for module in modules)
        if not fitting:
            raise InputError(f"{described} is a LoRA of another family: none of its {len(unknown)} modules is here.")
        if name in self.adapters:
            raise InputError(f"a LoRA named {name!r} is loaded already: give another adapter_name.")
        self.adapters[name] = adapter
        try:
            self.check(self.changes({name: 1.0}))
        except InputError:
            del self.adapters[name]
            raise
        if unknown:
            few = ", ".join(unknown[:5])
            log.warning("%s: %d parts are not applied, for this model lacks them: %s", described, len(unknown), few)

    def changes(self, strengths: Mapping[str, float]) -> dict[str, dict[str, LowRank]]:
        """Component -> tensor of the checkpoint -> what the LoRAs at these strengths add to it."""
        total: dict[str, dict[str, LowRank]] = {}
        for name, strength in strengths.items():
            for component, modules in self.adapters[name].modules.items():
                known, here = self.modules(component), total.setdefault(component, {})
                for module, correction in modules.items():
                    if strength and (tensor := known.get(module)):
                        change = correction.change(strength)
                        here[tensor] = here[tensor] + change if tensor in here else change
        return total
