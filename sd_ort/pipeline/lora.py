"""LoRAs on a loaded pipeline: small corrections of weights, added, weighed and taken off while it runs.

A LoRA says of a module: weight += strength * alpha / rank * up @ down (Hu et al., 2021, section 4.1). The weights of an
optimized graph are transposed, packed and rounded ones; their recipes (`fusion_passes.recipes`) are linear, so that the
recipe of a correction is the correction of the weight. A change of strength reopens the sessions it touches with the
corrected weights in place of those on disk: ONNX Runtime packs them and captures its graphs as it does any others, so
that a step takes what it takes without. No file changes, and without a LoRA the weights are those on disk again.

    formats   diffusers and PEFT (lora_A, lora_B; lora.down, lora.up), Kohya (lora_unet_..., with alpha)
    modules   linear layers and convolutions (LoCon) of the UNet and the text encoders
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from sd_ort.core.errors import InputError, first_line
from sd_ort.core.folder import check_component, read_manifest

if TYPE_CHECKING:
    from fusion_passes.recipes import Recipe  # what reads graphs takes half a second to import

log = logging.getLogger("sd_ort")
Weights = Mapping[str, Any]

# What the names of a LoRA's tensors begin with -> component. Bare names are the UNet's.
PREFIXES = {
    "lora_unet_": "unet", "lora_te1_": "text_encoder", "lora_te2_": "text_encoder_2", "lora_te_": "text_encoder",
    "unet.": "unet", "text_encoder_2.": "text_encoder_2", "text_encoder.": "text_encoder",
}  # fmt: skip
PART = re.compile(
    r"(?P<module>.+?)(?:[._]lora)?[._](?:(?P<down>lora_down|lora_A|down)|(?P<up>lora_up|lora_B|up))"
    r"(?:\.default(?:_0)?)?\.weight$"
)


@dataclass
class Correction:
    """Of one module: up (out, rank[, 1, 1]) and down (rank, in[, h, w]), float32, and alpha."""

    down: np.ndarray | None = None
    up: np.ndarray | None = None
    alpha: float | None = None

    def change(self) -> np.ndarray:
        """What is added to the module's weight at strength 1."""
        assert self.up is not None
        assert self.down is not None
        rank = self.down.shape[0]
        product = self.up.reshape(self.up.shape[0], -1) @ self.down.reshape(rank, -1)
        scale = 1.0 if self.alpha is None else self.alpha / rank
        return np.asarray(product * scale, np.float32).reshape(self.up.shape[0], *self.down.shape[1:])


@dataclass
class Adapter:
    """A LoRA: component -> module's name with underscores -> correction; `left` are names it could not read."""

    modules: dict[str, dict[str, Correction]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)


def read_adapter(source: str | Path | Weights, unet_config: Mapping[str, Any]) -> Adapter:
    """A LoRA from a .safetensors file or a dict of tensors. Raises InputError for a file that is none."""
    tensors, alphas = _tensors(source)
    if any(re.match(r"lora_unet_(input|output)_blocks", name) for name in tensors):
        tensors = _diffusers_blocks(tensors, unet_config)
    adapter = Adapter()
    for name, tensor in tensors.items():
        prefix = next((p for p in PREFIXES if name.startswith(p)), "")
        component, rest = PREFIXES.get(prefix, "unet"), name.removeprefix(prefix)
        if rest.endswith(".alpha"):
            _correction(adapter, component, rest.removesuffix(".alpha")).alpha = float(np.asarray(tensor))
        elif match := PART.match(rest):
            correction = _correction(adapter, component, match["module"])
            setattr(correction, "down" if match["down"] else "up", tensor.astype(np.float32))
            if correction.alpha is None:
                correction.alpha = alphas.get(component)
        else:
            adapter.left.append(name)
    for component, modules in adapter.modules.items():
        halves = [name for name, c in modules.items() if c.down is None or c.up is None]
        adapter.left += [f"{component}.{name}" for name in halves]
        for name in halves:
            del modules[name]
    if not any(adapter.modules.values()):
        raise InputError(f"{_named(source)} is no LoRA: none of its tensors is a pair of up and down matrices.")
    return adapter


def _correction(adapter: Adapter, component: str, module: str) -> Correction:
    name = module.replace(".processor", "").replace(".lora_linear_layer", "").replace(".", "_")
    name = re.sub(r"_lora$", "", name).removeprefix("text_model_")
    name = re.sub(r"_to_out$", "_to_out_0", name)
    return adapter.modules.setdefault(component, {}).setdefault(name, Correction())


def _named(source: str | Path | Weights) -> str:
    return "the dict" if isinstance(source, Mapping) else str(source)


def _tensors(source: str | Path | Weights) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """The tensors by name, and alpha by component where PEFT's metadata tell one."""
    if isinstance(source, Mapping):
        arrays = {n: np.asarray(t.float().cpu() if hasattr(t, "cpu") else t) for n, t in source.items()}
        return arrays, {}
    path = Path(source)
    if path.suffix != ".safetensors":
        raise InputError(f"{path} is not a .safetensors file: LoRAs are read from those alone, pickles can run code.")
    from safetensors import safe_open

    try:
        with safe_open(path, "pt") as file:
            found = {name: file.get_tensor(name).float().numpy() for name in file.keys()}  # noqa: SIM118
            metadata = json.loads((file.metadata() or {}).get("lora_adapter_metadata", "{}"))
    except Exception as error:  # SafetensorError is no OSError, and a file of another kind fails in more ways
        raise InputError(f"{path} cannot be read as a LoRA ({first_line(error)}): get it again.") from error
    return found, {n.removesuffix(".lora_alpha"): float(a) for n, a in metadata.items() if n.endswith(".lora_alpha")}


def _diffusers_blocks(tensors: dict[str, np.ndarray], unet_config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """SDXL LoRAs in the original names of blocks, in diffusers', by its own mapping."""
    from diffusers.loaders import lora_conversion_utils as conversion

    return dict(conversion._maybe_map_sgm_blocks_to_diffusers(dict(tensors), SimpleNamespace(**unet_config)))


class Loras:
    """The LoRAs of one pipeline folder, and the corrected weights at given strengths."""

    def __init__(self, folder: Path) -> None:
        """Raises InputError for a folder whose manifest does not say where its weights come from."""
        from fusion_passes import recipes
        from sd_ort.graphs import hoist

        self.folder = folder
        entries = read_manifest(folder).get("components", {})
        self.recipes = {n: recipes.load(e["weights"]) for n, e in entries.items() if "weights" in e}
        if "unet" not in self.recipes:
            raise InputError(f"{folder} does not say where its weights come from: export it again with this sd-ort.")
        self.parts = {n: list(hoist.PARTS.values()) if "hoisted" in e else [n] for n, e in entries.items()}
        self.adapters: dict[str, Adapter] = {}

    def add(self, name: str, adapter: Adapter, described: str) -> None:
        """Keep an adapter under `name`; warns of what it has for modules that are not there.

        Raises InputError when it is for another model: nothing fits, or a shape differs.
        """
        unknown = list(adapter.left)
        fitting = 0
        for component, modules in adapter.modules.items():
            sources = self._sources(component)
            unknown += [f"{component}.{module}" for module in modules if module not in sources]
            fitting += sum(module in sources for module in modules)
        if not fitting:
            raise InputError(f"{described} is a LoRA of another family: none of its {len(unknown)} modules is here.")
        if name in self.adapters:
            raise InputError(f"a LoRA named {name!r} is loaded already: give another adapter_name.")
        self.adapters[name] = adapter
        try:
            self.weights({name: 1.0})
        except InputError:
            del self.adapters[name]
            raise
        if unknown:
            few = ", ".join(unknown[:5])
            log.warning("%s: %d parts are not applied, for this model lacks them: %s", described, len(unknown), few)

    def weights(self, strengths: Mapping[str, float]) -> dict[str, dict[str, np.ndarray]]:
        """Component folder -> initializer -> its numbers with the LoRAs at these strengths; those that change."""
        changed: dict[str, dict[str, np.ndarray]] = {}
        for component in self.recipes:
            changed |= self.corrected(component, self._changes(component, strengths))
        return changed

    def corrected(self, component: str, changes: Mapping[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
        """Component folder -> initializer -> its numbers, with `changes` (float32, in torch's layout, by the name that
        the recipes have) added. Raises InputError for a change of another shape."""
        if not changes:
            return {}
        made = {part: self._corrected(part, self.recipes[component], changes) for part in self.parts[component]}
        return {part: weights for part, weights in made.items() if weights}

    def _sources(self, component: str) -> dict[str, str]:
        """Module with underscores -> its weight's name, of all that a component's recipes read."""
        from fusion_passes import recipes

        names = {name for recipe in self.recipes.get(component, {}).values() for name in recipes.sources(recipe)}
        modules = {name.removesuffix(".weight"): name for name in names if name.endswith(".weight")}
        return {module.removeprefix("text_model.").replace(".", "_"): name for module, name in modules.items()}

    def _changes(self, component: str, strengths: Mapping[str, float]) -> dict[str, np.ndarray]:
        sources, total = self._sources(component), dict[str, np.ndarray]()
        for name, strength in strengths.items():
            for module, correction in self.adapters[name].modules.get(component, {}).items():
                if module in sources and strength:
                    change = strength * correction.change()
                    there = total.get(sources[module])
                    total[sources[module]] = change if there is None else there + change
        return total

    def _corrected(
        self, part: str, table: Mapping[str, Recipe], changes: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        from fusion_passes import recipes
        from sd_ort.graphs.load import load

        made = {}
        for name, value in load(check_component(self.folder, part)).graph.initializers.items():
            if name not in table or value.const_value is None:
                continue
            try:
                change = recipes.change(table[name], changes)
                if change is None:
                    continue
                weight = value.const_value.numpy()
                if change.size != weight.size or change.ndim < weight.ndim:
                    raise ValueError(f"{list(change.shape)} instead of {list(weight.shape)}")
            except ValueError as error:
                where = ", ".join(recipes.sources(table[name]))
                raise InputError(f"the LoRA is of another family: its {where} has another shape ({error}).") from error
            exact = weight.astype(np.float32) + change.reshape(weight.shape)
            made[name] = exact.astype(weight.dtype)
        return made


class LoraMethods:
    """diffusers' methods for LoRAs, for a pipeline with `folder`, `models`, `unet_config` and `reopen`."""

    folder: Path
    models: Any
    unet_config: dict[str, Any]
    loras: Loras | None = None
    strengths: Mapping[str, float] = {}
    lora_scale: float = 1.0

    def load_lora_weights(self, source: str | Path | Weights, adapter_name: str | None = None) -> None:
        """Load a LoRA (a .safetensors file or a dict of tensors) beside those that are there, at strength 1.

        Raises InputError for a file that is no LoRA, or one of another model family.
        """
        if self.loras is None:
            self.loras = Loras(self.folder)
        name = adapter_name or f"default_{len(self.loras.adapters)}"
        self.loras.add(name, read_adapter(source, self.unet_config), _named(source))
        self._set({**self.strengths, name: 1.0})

    def set_adapters(self, adapter_names: str | Sequence[str], adapter_weights: Any = None) -> None:
        """Use these LoRAs and no others, each with its strength: one number for all, or one each; 1 when not given.

        Raises InputError for a name that was not loaded, or another number of strengths.
        """
        names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
        given = adapter_weights if isinstance(adapter_weights, (list, tuple)) else [adapter_weights] * len(names)
        known = self.get_list_adapters()
        if unknown := [name for name in names if name not in known]:
            raise InputError(f"no LoRA named {unknown[0]!r} is loaded: there are {', '.join(known) or 'none'}.")
        if len(given) != len(names):
            raise InputError(f"{len(given)} strengths for {len(names)} LoRAs: give one each.")
        self._set({n: 1.0 if s is None else float(s) for n, s in zip(names, given, strict=True)})

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
        kept = self.strengths if adapter_names is None else {n: self.strengths.get(n, 1.0) for n in adapter_names}
        self.set_adapters(list(kept), [strength * lora_scale for strength in kept.values()])

    def unfuse_lora(self) -> None:
        """Draw without LoRAs; they stay loaded."""
        self._set({})

    def unload_lora_weights(self) -> None:
        """Forget all LoRAs: the weights are those on disk again."""
        self._set({})
        self.loras = None

    def _set(self, strengths: Mapping[str, float]) -> None:
        active = {name: strength * self.lora_scale for name, strength in strengths.items() if strength}
        weights = self.loras.weights(active) if self.loras and active else {}
        self.strengths = strengths
        self.models.replace_weights(weights)
        self.reopen()

    def reopen(self) -> None:
        """Called after sessions were closed: whoever keeps one must let it go."""
