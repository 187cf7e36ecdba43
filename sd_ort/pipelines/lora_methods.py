"""diffusers' methods for LoRAs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sd_ort.core.errors import InputError
from sd_ort.pipelines.arguments import is_finite
from sd_ort.weights.lora_files import Weights, lora_label, read_adapter

if TYPE_CHECKING:
    from sd_ort.weights.lora import LoraManager


def _listed(names: Any) -> list[str]:
    """Return one name or several as a list. Raises InputError for what are no names."""
    listed: list[Any] = (
        [names] if isinstance(names, str) else list(names) if isinstance(names, (list, tuple)) else [None]
    )
    if not all(isinstance(name, str) for name in listed):
        raise InputError(f"{str(names)[:80]!r} are no names of LoRAs: give a string, or a list of strings.")
    return listed


class LoraMixin:
    """diffusers' methods for LoRAs, for a pipeline or for the sessions of an integration."""

    folder: Path
    models: Any
    unet_config: dict[str, Any]
    loras: LoraManager | None = None
    strengths: Mapping[str, float] = {}
    disabled: Mapping[str, float] = {}  # those that `enable_lora` uses again
    lora_scale: float = 1.0

    def load_lora_weights(
        self, source: str | Path | Weights, adapter_name: str | None = None, weight_name: str | None = None
    ) -> None:
        """Load a LoRA (a .safetensors file or a dict of tensors) beside those that are there, at strength 1.

        `weight_name`: the file in the folder `source`. Raises InputError for a file that is no LoRA, or one of another
        model family.
        """
        from sd_ort.weights.lora import LoraManager  # what reads graphs takes half a second to import

        if weight_name is not None and not isinstance(source, Mapping):
            source = Path(source) / weight_name

        if self.loras is None:
            self.loras = LoraManager(self.folder)
        name = adapter_name or f"default_{len(self.loras.adapters)}"
        self.loras.add(name, read_adapter(source, self.unet_config), lora_label(source))
        self._set({**self.strengths, name: 1.0})

    def set_adapters(self, adapter_names: str | Sequence[str], adapter_weights: Any = None) -> None:
        """Use these LoRAs and no others, each with its strength: one number for all, or one each; 1 when not given.

        Raises InputError for a name that was not loaded, another number of strengths, or one that is not finite.
        """
        names = _listed(adapter_names)
        given = adapter_weights if isinstance(adapter_weights, (list, tuple)) else [adapter_weights] * len(names)
        self._check_names(names)
        if len(given) != len(names):
            raise InputError(f"{len(given)} strengths for {len(names)} LoRAs: give one each.")
        if any(isinstance(strength, Mapping) for strength in given):
            raise InputError("a LoRA has one strength, not one for each block: give a number such as 0.8.")
        if wrong := [strength for strength in given if strength is not None and not is_finite(strength)]:
            raise InputError(f"{wrong[0]!r} is no strength of a LoRA: give a number such as 0.8.")
        strengths = {n: 1.0 if s is None else float(s) for n, s in zip(names, given, strict=True)}
        self._set(strengths)

    def scale_loras(self, scale: float) -> None:
        """Weigh all LoRAs by `scale` too, from now on: cross_attention_kwargs of a call."""
        if scale != self.lora_scale:
            self.lora_scale = scale
            if self.strengths:
                self._set(self.strengths)

    def get_list_adapters(self) -> list[str]:
        """Names of the LoRAs that are loaded."""
        return list(self.loras.adapters) if self.loras else []

    def get_active_adapters(self) -> list[str]:
        """Names of the LoRAs that are in use."""
        return list(self.strengths)

    def fuse_lora(self, lora_scale: float = 1.0, adapter_names: Sequence[str] | None = None) -> None:
        """Multiply the strengths by `lora_scale`: the weights of a session hold their LoRAs always."""
        if not is_finite(lora_scale):
            raise InputError(f"{lora_scale!r} is no scale of LoRAs: give a number such as 0.8.")
        kept = self.strengths if adapter_names is None else {n: self.strengths.get(n, 1.0) for n in adapter_names}
        self.set_adapters(list(kept), [strength * lora_scale for strength in kept.values()])

    def unfuse_lora(self) -> None:
        """Draw without LoRAs; they stay loaded."""
        self._set({})

    def disable_lora(self) -> None:
        """Draw without LoRAs until `enable_lora`."""
        if self.strengths:
            disabled = self.strengths
            self._set({})
            self.disabled = disabled

    def enable_lora(self) -> None:
        """Use the LoRAs again that `disable_lora` left out."""
        if self.disabled:
            self._set(self.disabled)

    def delete_adapters(self, adapter_names: str | Sequence[str]) -> None:
        """Forget these LoRAs. Raises InputError for a name that was not loaded."""
        names = _listed(adapter_names)
        self._check_names(names)
        left = {name: strength for name, strength in self.strengths.items() if name not in names}
        if left != self.strengths:
            self._set(left)
        self.disabled = {name: strength for name, strength in self.disabled.items() if name not in names}
        if self.loras is not None:
            for name in names:
                self.loras.adapters.pop(name, None)

    def unload_lora_weights(self) -> None:
        """Forget all LoRAs: the weights are those on disk again."""
        self._set({})
        if self.loras is not None:
            self.loras.adapters.clear()  # what was read of the folder stays

    def _check_names(self, names: Sequence[str]) -> None:
        known = self.get_list_adapters()
        if unknown := [name for name in names if name not in known]:
            raise InputError(f"no LoRA named {unknown[0]!r} is loaded: there are {', '.join(known) or 'none'}.")

    def _set(self, strengths: Mapping[str, float]) -> None:
        self.disabled = {}
        self.strengths = {}  # whoever interrupts a change draws without LoRAs, until the next one
        if self.loras is not None:
            active = {name: strength * self.lora_scale for name, strength in strengths.items() if strength}
            self.on_weights_updated(self.loras.apply(self.models, self.loras.deltas(active)))
        self.strengths = strengths

    def on_weights_updated(self, closed: bool) -> None:
        """Called after weights were changed; when sessions were `closed` for it, whoever keeps one must let it go."""
