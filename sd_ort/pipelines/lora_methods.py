"""diffusers' methods for LoRAs."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sd_ort.core.errors import InputError
from sd_ort.pipelines.arguments import is_finite
from sd_ort.weights.lora_files import Weights, lora_label, read_adapter

if TYPE_CHECKING:
    from sd_ort.weights.lora import AdapterScale, ComponentScale, LoraManager

log = logging.getLogger("sd_ort")
# Components that an adapter can change.
ADAPTABLE = ("unet", "transformer", "text_encoder", "text_encoder_2", "text_encoder_3")


@dataclass(frozen=True)
class LoraState:
    """Active adapters of a pipeline, as diffusers and PEFT define them; the weights follow from this state.

    `scales`: adapter scales by name, of all loaded adapters. `active`: names by component. `fused`: while a component
    has some, it runs with these scales alone. `permanent`: fused adapters that were unloaded; `LoraManager` has them
    under other names. `enabled`: what `disable_lora` sets. `factor`: cross_attention_kwargs["scale"] of a call.
    """

    scales: Mapping[str, AdapterScale]
    active: Mapping[str, tuple[str, ...]]
    fused: Mapping[str, Mapping[str, ComponentScale]]
    permanent: Mapping[str, AdapterScale]
    enabled: bool = True
    factor: float = 1.0

    def scale(self, name: str, component: str) -> ComponentScale:
        """Return the scale of an adapter in a component, 1 if it was given for other components alone."""
        scale = self.scales[name]
        return scale.get(component, 1.0) if isinstance(scale, Mapping) else scale

    def effective(self) -> dict[str, AdapterScale]:
        """Return the scales of the adapters in use, by name and component."""
        used: dict[str, dict[str, ComponentScale]] = {}
        for component in ADAPTABLE if self.enabled else ():
            active = {n: _times(self.scale(n, component), self.factor) for n in self.active.get(component, ())}
            for name, scale in (self.fused.get(component) or active).items():
                used.setdefault(name, {})[component] = scale
        return {**self.permanent, **used}


NO_LORAS = LoraState({}, {}, {}, {})


def _listed(names: Any) -> list[str]:
    """Return one name or several as a list. Raises InputError for what are no names."""
    listed: list[Any] = (
        [names] if isinstance(names, str) else list(names) if isinstance(names, (list, tuple)) else [None]
    )
    if not all(isinstance(name, str) for name in listed):
        raise InputError(f"{str(names)[:80]!r} are no names of LoRAs: give a string, or a list of strings.")
    return listed


class LoraMixin:
    """diffusers' methods for LoRAs, for a pipeline or for the sessions of an integration.

    A method that raises leaves the adapters, their scales and the weights as they were.
    """

    folder: Path
    models: Any
    unet_config: dict[str, Any]
    loras: LoraManager | None = None
    lora_state: LoraState = NO_LORAS
    LORA_COMPONENTS: tuple[str, ...] = ("unet", "text_encoder", "text_encoder_2")  # that fuse_lora fuses by default

    def load_lora_weights(
        self, source: str | Path | Weights, adapter_name: str | None = None, weight_name: str | None = None
    ) -> None:
        """Load a LoRA (a .safetensors file or a dict of tensors) and use it at scale 1.

        As in diffusers, it replaces the adapters in use in the components that it changes, and others stay loaded.
        `weight_name`: the file in the folder `source`. Raises InputError for a file that is no LoRA, or one of another
        model family.
        """
        state = self.lora_state
        if any(state.fused.values()) or not state.enabled:
            what = "fused: call unload_lora_weights or unfuse_lora" if state.enabled else "disabled: call enable_lora"
            raise InputError(f"LoRAs are {what} before loading another one.")
        if weight_name is not None and not isinstance(source, Mapping):
            source = Path(source) / weight_name
        manager = self._lora_manager()
        name = adapter_name or f"default_{len(state.scales)}"
        adapter = read_adapter(source, self.unet_config)
        manager.add(name, adapter, lora_label(source))
        active = {**state.active, **dict.fromkeys(adapter.modules, (name,))}
        try:
            self._set_loras(replace(state, scales={**state.scales, name: 1.0}, active=active))
        except BaseException:
            del manager.adapters[name]
            raise

    def set_adapters(self, adapter_names: str | Sequence[str], adapter_weights: Any = None) -> None:
        """Use these LoRAs and no others, each with its scale: one number for all, or one each; 1 when not given.

        A scale may be a dict by component, the UNet's a dict of blocks: {"text_encoder": 0.5, "unet": {"down": 0.8,
        "mid": 1, "up": {"block_0": 0.6, "block_1": [0.4, 0.8, 1]}}}. Blocks have their number in the UNet, lists a
        number for each transformer, and what is not given is 1. A ResNet has the scale of its block's transformer of
        the same number.

        Raises InputError for a name that was not loaded, another number of scales, one that is not finite, or a block
        without transformers.
        """
        names = _listed(adapter_names)
        weights = adapter_weights if isinstance(adapter_weights, (list, tuple)) else [adapter_weights] * len(names)
        self._check_names(names)
        if len(weights) != len(names):
            raise InputError(f"{len(weights)} strengths for {len(names)} LoRAs: give one each.")
        if isinstance(adapter_weights, Mapping) and len(names) > 1:
            raise InputError(f"one dict of scales for {len(names)} LoRAs: give a list with one for each.")
        scales = {name: self._parse_scale(scale) for name, scale in zip(names, weights, strict=True)}
        state = self.lora_state
        active = dict.fromkeys(ADAPTABLE, tuple(names))
        self._set_loras(replace(state, scales={**state.scales, **scales}, active=active))

    def scale_loras(self, scale: float) -> None:
        """Weigh all LoRAs by `scale` too, from now on: cross_attention_kwargs of a call."""
        if scale != self.lora_state.factor:
            self._set_loras(replace(self.lora_state, factor=scale))

    def get_list_adapters(self) -> dict[str, list[str]]:
        """Names of the loaded LoRAs, by component that they change."""
        adapters = self.loras.adapters if self.loras else {}
        names = {c: [n for n in self.lora_state.scales if adapters[n].modules.get(c)] for c in ADAPTABLE}
        return {component: each for component, each in names.items() if each}

    def get_active_adapters(self) -> list[str]:
        """Names of the LoRAs in use: the UNet's, or of a text encoder if the UNet has none."""
        active = self.lora_state.active
        return list(next((active[component] for component in ADAPTABLE if active.get(component)), ()))

    def fuse_lora(
        self,
        components: Sequence[str] | None = None,
        lora_scale: float = 1.0,
        safe_fusing: bool = False,
        adapter_names: Sequence[str] | None = None,
    ) -> None:
        """Keep the LoRAs in use, or `adapter_names`, in the weights of `components`, also after `unload_lora_weights`.

        Scales are multiplied by `lora_scale` and stay so. `safe_fusing` changes nothing: weights with NaN are rejected
        when they are loaded.
        """
        components = self.LORA_COMPONENTS if components is None else components
        is_list = isinstance(components, (list, tuple, set, frozenset))
        listed: list[Any] = list(components) if is_list else [components]
        if wrong := [each for each in listed if not isinstance(each, str) or each not in ADAPTABLE or not is_list]:
            raise InputError(f"fuse_lora: components {str(wrong[0])[:80]!r} must be a list of {', '.join(ADAPTABLE)}.")
        state = self.lora_state
        if adapter_names is not None:
            self._check_names(adapter_names)
        used = {name for component in components for name in state.active.get(component, ())}
        scales = {n: _times_all(s, _number(lora_scale)) if n in used else s for n, s in state.scales.items()}
        state = replace(state, scales=scales, enabled=True)
        fused = {
            component: {
                **state.fused.get(component, {}),
                **{name: state.scale(name, component) for name in adapter_names or state.active.get(component, ())},
            }
            for component in components
        }
        self._set_loras(replace(state, fused={**state.fused, **fused}))

    def unfuse_lora(self, components: Sequence[str] | None = None) -> None:
        """Undo `fuse_lora` for `components`: the LoRAs in use are applied as before."""
        components = self.LORA_COMPONENTS if components is None else components
        fused = {name: scales for name, scales in self.lora_state.fused.items() if name not in components}
        self._set_loras(replace(self.lora_state, fused=fused))

    @property
    def num_fused_loras(self) -> int:
        """Number of fused LoRAs."""
        return len(self.fused_loras)

    @property
    def fused_loras(self) -> set[str]:
        return {name for scales in self.lora_state.fused.values() for name in scales}

    def disable_lora(self) -> None:
        """Generate without LoRAs until `enable_lora`; fused ones are unfused."""
        self._set_loras(replace(self.lora_state, fused={}, enabled=False))

    def enable_lora(self) -> None:
        """Use the LoRAs again that `disable_lora` left out."""
        self._set_loras(replace(self.lora_state, enabled=True))

    def delete_adapters(self, adapter_names: str | Sequence[str]) -> None:
        """Forget these LoRAs. As in PEFT, if none in use is left, the first loaded one is used.

        Raises InputError for a name that was not loaded.
        """
        names = _listed(adapter_names)
        self._check_names(names)
        state = self.lora_state
        scales = {name: scale for name, scale in state.scales.items() if name not in names}
        active = {}
        for component, used in state.active.items():
            remaining = tuple(name for name in used if name not in names)
            loaded = [name for name in self.get_list_adapters().get(component, ()) if name in scales]
            active[component] = remaining or tuple(loaded[:1] if set(used) & set(names) else ())
        fused = {c: {n: s for n, s in used.items() if n not in names} for c, used in state.fused.items()}
        self._set_loras(replace(state, scales=scales, active=active, fused=fused))
        self._drop_adapters(names)

    def unload_lora_weights(self) -> None:
        """Forget all LoRAs: the weights are those on disk again, with the fused LoRAs if there are some."""
        permanent, state = dict(self.lora_state.permanent), self.lora_state
        adapters = self.loras.adapters if self.loras else {}
        for component, scales in state.fused.items():
            for name, scale in scales.items():
                hidden = f"fused {len(permanent)}: {name}"
                adapters[hidden] = adapters[name]
                permanent[hidden] = {component: scale}
        self._set_loras(replace(NO_LORAS, permanent=permanent, factor=state.factor))
        self._drop_adapters(state.scales)

    @classmethod
    def lora_state_dict(cls, source: str | Path | Weights, **options: Any) -> Any:
        """Return a file's tensors by diffusers' names and alphas, as diffusers' method with these `options` does."""
        from diffusers.loaders import StableDiffusionLoraLoaderMixin

        return StableDiffusionLoraLoaderMixin.lora_state_dict(source, **options)

    def _lora_manager(self) -> LoraManager:
        if self.loras is None:
            # Imports onnx: that takes half a second, and an application's protobuf may be too old for it.
            from sd_ort.weights.lora import LoraManager

            self.loras = LoraManager(self.folder)
        return self.loras

    def _drop_adapters(self, names: Iterable[str]) -> None:
        for name in names:
            if self.loras is not None:
                self.loras.adapters.pop(name, None)

    def _check_names(self, names: Sequence[str]) -> None:
        loaded = self.lora_state.scales
        if unknown := [name for name in names if name not in loaded]:
            raise InputError(f"no LoRA named {unknown[0]!r} is loaded: there are {', '.join(loaded) or 'none'}.")

    def _parse_scale(self, scales_by_component: Any) -> AdapterScale:
        """Return diffusers' adapter weight as a scale; None is 1."""
        if not isinstance(scales_by_component, Mapping):
            return _number(scales_by_component)
        if unknown := [name for name in scales_by_component if name not in ADAPTABLE]:
            log.warning("set_adapters: the pipeline has no LoRA component %s; its scale is ignored.", unknown[0])
        scales: dict[str, ComponentScale] = {}
        for component in ADAPTABLE:
            scale = scales_by_component.get(component)
            if component == "unet" and isinstance(scale, Mapping):
                scales[component] = self._block_scales(scale)
            else:
                scales[component] = _number(scale)
        return scales

    def _block_scales(self, scales_by_block: Mapping[str, Any]) -> dict[str, float]:
        """Return scales by the start of a module's name, from diffusers' dict of the UNet's blocks."""
        layers = int(self.unet_config.get("layers_per_block", 2))
        if unknown := [name for name in scales_by_block if name not in ("down", "mid", "up")]:
            raise InputError(f"the UNet has no blocks {unknown[0]!r} with transformers: give down, mid or up.")
        middle = scales_by_block.get("mid")
        middle = middle[0] if isinstance(middle, list) and len(middle) == 1 else middle
        scales = {"mid_block_attentions_0": _number(middle)}
        for way, count in (("down", layers), ("up", layers + 1)):
            types = self.unet_config.get(f"{way}_block_types", ())
            numbers = [number for number, kind in enumerate(types) if "CrossAttn" in kind]
            blocks = scales_by_block.get(way)
            if not isinstance(blocks, Mapping):
                blocks = {f"block_{number}": blocks for number in numbers}
            if unknown := [name for name in blocks if name not in [f"block_{number}" for number in numbers]]:
                raise InputError(f"the UNet's {way} blocks have no transformers in {unknown[0]!r}.")
            for number in numbers:
                scale = blocks.get(f"block_{number}")
                each = list(scale) if isinstance(scale, (list, tuple)) else [scale]
                each = each * count if len(each) == 1 else each
                if len(each) != count:
                    raise InputError(f"{len(each)} scales for the {count} transformers of {way}.block_{number}.")
                for layer, value in enumerate(each):
                    for kind in ("attentions", "resnets", "downsamplers", "upsamplers"):
                        scales[f"{way}_blocks_{number}_{kind}_{layer}_"] = _number(value)
        return scales

    def _set_loras(self, state: LoraState) -> None:
        """Give the sessions the weights of `state`; those of the former state if this fails."""
        former, self.lora_state = self.lora_state, state
        if self.loras is None or state.effective() == former.effective():
            return
        try:
            self._update_weights(state)
        except BaseException:
            self.lora_state = former
            self._update_weights(former)
            raise

    def _update_weights(self, state: LoraState) -> None:
        assert self.loras is not None
        self.on_weights_updated(self.loras.apply(self.models, self.loras.deltas(state.effective())))

    def on_weights_updated(self, closed: bool) -> None:
        """Called after weights were changed; when sessions were `closed` for it, whoever keeps one must let it go."""


def _number(scale: Any) -> float:
    """Return a scale as a number, 1 for None. Raises InputError if it is none."""
    if scale is None:
        return 1.0
    if not is_finite(scale):
        raise InputError(f"{str(scale)[:80]!r} is no strength of a LoRA: give a number such as 0.8.")
    return float(scale)


def _times(scale: ComponentScale, factor: float) -> ComponentScale:
    return {name: each * factor for name, each in scale.items()} if isinstance(scale, Mapping) else scale * factor


def _times_all(scale: AdapterScale, factor: float) -> AdapterScale:
    return {n: _times(each, factor) for n, each in scale.items()} if isinstance(scale, Mapping) else scale * factor
