"""Parser of LoRA files: the deltas of a model's weights and biases, by component and module.

formats   diffusers and PEFT (lora_A, lora_B; lora.down, lora.up), Kohya and LyCORIS (lora_unet_..., with alpha), also
          with the UNet's modules in LDM's names, or a transformer's in the original ones (ComfyUI, Kohya)
kinds     LoRA, LoCon, DoRA, LoHa, LoKr, full differences
modules   linear layers, convolutions and norms of the UNet and the text encoders
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from sd_ort.checkpoints.diffusion_transformers import FAMILIES
from sd_ort.checkpoints.transformer_layouts import RowSlice, original_modules
from sd_ort.core.errors import InputError, first_line
from sd_ort.core.files import parsing, read_json
from sd_ort.core.safetensors_file import read_float32
from sd_ort.weights.deltas import (
    Delta,
    DifferenceDelta,
    DoraDelta,
    FactorProduct,
    HadamardDelta,
    KroneckerDelta,
    LowRankDelta,
)

Weights = Mapping[str, Any]
Shape = tuple[int, ...]

# Component by prefix of a tensor name. Names without a prefix are the UNet's.
PREFIXES = {
    "lora_unet_": "unet", "lora_te1_": "text_encoder", "lora_te2_": "text_encoder_2", "lora_te_": "text_encoder",
    "unet.": "unet", "text_encoder_2.": "text_encoder_2", "text_encoder.": "text_encoder", "base_model.model.": "unet",
}  # fmt: skip
# The same for pipelines with a transformer. Kohya's third encoder is T5, which FLUX.1 has as the second.
TRANSFORMER_PREFIXES = {
    **{prefix: "transformer" if component == "unet" else component for prefix, component in PREFIXES.items()},
    "lora_transformer_": "transformer", "transformer.": "transformer", "model.diffusion_model.": "transformer",
    "diffusion_model.": "transformer", "text_encoder_3.": "text_encoder_3", "lora_te3_": "text_encoder_3",
}  # fmt: skip
FACTORS = [f"hada_{name}" for name in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")] + [
    f"lokr_{name}" for name in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2")
]
# What a tensor is, by the end of its name.
KEYS = {
    "lora_down.weight": "down", "lora_A.weight": "down", "down.weight": "down",
    "lora_up.weight": "up", "lora_B.weight": "up", "up.weight": "up",
    "lora_mid.weight": "mid", "lora_up.bias": "up_bias", "lora_B.bias": "up_bias",
    "dora_scale": "magnitude", "lora_magnitude_vector": "output_magnitude",
    "lora_magnitude_vector.weight": "output_magnitude",
    "diff": "diff", "w_norm": "diff", "diff_b": "diff_b", "b_norm": "diff_b", "alpha": "alpha",
    **{name: name for name in FACTORS},
}  # fmt: skip
# Kinds that are not applied, by the end of a tensor's name.
UNSUPPORTED = {
    "oft_blocks": "OFT", "oft_diag": "OFT", "oft_r": "OFT", "oft_R": "OFT", "oft_R.weight": "OFT", "boft_R": "BOFT",
    "boft_s": "BOFT", "a1.weight": "GLoRA", "b1.weight": "GLoRA", "on_input": "IA3", "ia3_l": "IA3",
    "vera_lambda_b": "VeRA", "vera_lambda_d": "VeRA", "set_weight": "a file of replaced weights",
}  # fmt: skip
ENDS = "|".join(re.escape(end) for end in (*KEYS, *UNSUPPORTED))
TENSOR_NAME = re.compile(rf"(?P<module>.+?)(?:[._]lora)?[._](?P<end>{ENDS})$")
# Modules in LDM's names, after the blocks were renamed.
LDM_MODULES = {
    "in_layers_0": "norm1", "in_layers_2": "conv1", "emb_layers_1": "time_emb_proj", "out_layers_0": "norm2",
    "out_layers_3": "conv2", "skip_connection": "conv_shortcut", "op": "conv", "input_blocks_0_0": "conv_in",
    "out_0": "conv_norm_out", "out_2": "conv_out", "time_embed_0": "time_embedding_linear_1",
    "time_embed_2": "time_embedding_linear_2", "label_emb_0_0": "add_embedding_linear_1",
    "label_emb_0_2": "add_embedding_linear_2",
}  # fmt: skip
# A module within a block of LDM's UNet: in the middle block three, in others a ResNet, a transformer and an upsampler.
LDM_BLOCK = re.compile(r"(?P<way>input|middle|output)_blocks?_(?:(?P<number>\d+)_)??(?P<inner>[012])_(?P<rest>\D.*)")


@dataclass
class LoraModule:
    """The tensors of one module, float32, by what they are (KEYS), and its entries of PEFT's config.

    `alpha`, `rank`: None for the file's own (by default alpha = rank). `rslora`: alpha is divided by sqrt(rank).
    `scales_dora_norm`: whether DoRA's norm depends on the adapter scale, as in PEFT. In ComfyUI and the WebUIs it does
    not, and W is the weight with the deltas of earlier adapters.
    """

    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    alpha: float | None = None
    rank: float | None = None
    rslora: bool = False
    scales_dora_norm: bool = True

    @property
    def is_complete(self) -> bool:
        """Whether the tensors define a delta."""
        return self._kind() is not None or "diff_b" in self.tensors

    @property
    def is_dora(self) -> bool:
        """Whether the weight's norms are replaced, which also a scale of 0 does."""
        return "magnitude" in self.tensors or "output_magnitude" in self.tensors

    def delta(
        self, scale: float = 1.0, shape: Shape | None = None, weight: Callable[[], np.ndarray] | None = None
    ) -> Delta | None:
        """Return the delta of the module's weight, or None if only its bias has one.

        Args:
            scale: the adapter scale.
            shape: the weight's, which LoHa and LoKr of convolutions do not store; another size is ignored.
            weight: returns the weight itself, for DoRA.
        """
        kind = self._kind()
        if kind is None:
            return None
        inside = not self.is_dora or self.scales_dora_norm
        delta: Any = getattr(self, f"_{kind}")(scale if inside else 1.0)
        if shape is not None and delta.shape != shape and math.prod(delta.shape) == math.prod(shape):
            delta = replace(delta, shape=shape)
        magnitude = self.tensors.get("magnitude", self.tensors.get("output_magnitude"))
        if magnitude is None or weight is None:
            return delta
        magnitude = magnitude.ravel() if "output_magnitude" in self.tensors else magnitude
        return DoraDelta(delta, magnitude, weight, 1.0 if inside else scale)

    def bias_delta(self, scale: float = 1.0) -> Delta | None:
        """Return the delta (out,) of the module's bias, or None."""
        if (up_bias := self.tensors.get("up_bias")) is not None:
            return DifferenceDelta(up_bias, scale * self._scale(len(self.tensors["down"])), up_bias.shape)
        difference = self.tensors.get("diff_b")
        return None if difference is None else DifferenceDelta(difference, scale, difference.shape)

    def _kind(self) -> str | None:
        names = self.tensors.keys()
        if {"down", "up"} <= names:
            return "lora"
        if {"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"} <= names:
            return "loha"
        if all(f"lokr_{w}" in names or {f"lokr_{w}_a", f"lokr_{w}_b"} <= names for w in ("w1", "w2")):
            return "lokr"
        return "difference" if "diff" in names else None

    def _scale(self, rank: float | None) -> float:
        """Return alpha / rank; `rank` is the tensors', None if no factor has one: alpha counts only if PEFT set it."""
        rank = rank if self.rank is None else self.rank
        if self.alpha is None or rank is None:
            return 1.0
        return self.alpha / (math.sqrt(rank) if self.rslora else rank)

    def _lora(self, scale: float) -> LowRankDelta:
        down, up, core = self.tensors["down"], self.tensors["up"], self.tensors.get("mid")
        rank, out = len(down), len(up)
        if core is not None:  # LyCORIS: LoCon with a core (rank, rank, h, w) between 1x1 filters
            down = np.einsum("mnhw,ni->mihw", core, down.reshape(rank, -1))
        return LowRankDelta(
            up.reshape(out, -1), down.reshape(rank, -1), (out, *down.shape[1:]),
            np.full(rank, scale * self._scale(rank), np.float32), (self,),
        )  # fmt: skip

    def _loha(self, scale: float) -> HadamardDelta:
        first, second = (self._product(f"hada_w{n}_a", f"hada_w{n}_b", f"hada_t{n}") for n in (1, 2))
        return HadamardDelta(first, second, scale * self._scale(len(first.b)), first.shape)

    def _lokr(self, scale: float) -> KroneckerDelta:
        rank: int | None = None
        factors = []
        for n in (1, 2):
            if (factor := self.tensors.get(f"lokr_w{n}")) is None:
                product = self._product(f"lokr_w{n}_a", f"lokr_w{n}_b", f"lokr_t{n}")
                rank, factor = len(product.b), product.array()
            factors.append(factor)
        left, right = factors
        if left.ndim != 2 or right.ndim < 2:
            raise ValueError(f"Kronecker factors {list(left.shape)} and {list(right.shape)}")
        shape = (left.shape[0] * right.shape[0], left.shape[1] * right.shape[1], *right.shape[2:])
        return KroneckerDelta(left, right, scale * self._scale(rank), shape)

    def _difference(self, scale: float) -> DifferenceDelta:
        return DifferenceDelta(self.tensors["diff"], scale, self.tensors["diff"].shape)

    def _product(self, a: str, b: str, core: str) -> FactorProduct:
        return FactorProduct(self.tensors[a], self.tensors[b], self.tensors.get(core))


@dataclass
class LoraAdapter:
    """A parsed LoRA: tensors by component and module name (with underscores); `unmatched`: names that are no LoRA's."""

    modules: dict[str, dict[str, LoraModule]] = field(default_factory=dict)
    unmatched: list[str] = field(default_factory=list)

    def module(self, component: str, name: str) -> LoraModule:
        """Return the tensors of a module, which any format names; adds it if it is new."""
        name = name.replace(".processor", "").replace(".lora_linear_layer", "").replace(".", "_")
        name = re.sub(r"_lora$", "", name).removeprefix("text_model_")
        name = re.sub(r"_to_out$", "_to_out_0", name)
        return self.modules.setdefault(component, {}).setdefault(name, LoraModule())


def read_adapter(source: str | Path | Weights, config: Mapping[str, Any]) -> LoraAdapter:
    """Parse a .safetensors file or a dict of tensors. Raises InputError if it is invalid or no LoRA.

    config: of the UNet or the transformer.
    """
    with parsing(lora_label(source), "a LoRA"):
        adapter = _parse(source, config)
        if config.get("_class_name") in FAMILIES:
            _split_original_modules(adapter, config)
    return adapter


def _parse(source: str | Path | Weights, config: Mapping[str, Any]) -> LoraAdapter:
    has_transformer = config.get("_class_name") in FAMILIES
    prefixes = TRANSFORMER_PREFIXES if has_transformer else PREFIXES
    if config.get("_class_name") == "FluxTransformer2DModel":
        prefixes = prefixes | {"lora_te3_": "text_encoder_2"}
    denoiser = "transformer" if has_transformer else "unet"
    tensors, configs = _read_tensors(source, denoiser)
    label = lora_label(source)
    if invalid := next((name for name, tensor in tensors.items() if not np.isfinite(tensor).all()), None):
        raise InputError(f"{label}: {invalid} holds NaN or infinity: get it again.")
    adapter = LoraAdapter()
    for full_name, tensor in tensors.items():
        name = full_name if has_transformer else _diffusers_name(full_name, config.get("layers_per_block", 2))
        name = re.sub(r"\.default(_\d+)?(?=\.|$)", "", name)
        prefix = next((p for p in prefixes if name.startswith(p)), "")
        component, rest = prefixes.get(prefix, denoiser), name.removeprefix(prefix)
        if not (match := TENSOR_NAME.match(rest)):
            adapter.unmatched.append(full_name)
            continue
        if (end := match["end"]) in UNSUPPORTED:
            raise InputError(f"{label} is {UNSUPPORTED[end]} ({full_name}): sd-ort applies LoRA, DoRA, LoHa and LoKr.")
        module = adapter.module(component, match["module"])
        if KEYS[end] == "alpha":
            if tensor.size != 1:
                raise InputError(f"{label}: {full_name} is no number but of shape {list(tensor.shape)}: get it again.")
            module.alpha = float(tensor.reshape(()))
        else:
            module.tensors[KEYS[end]] = tensor.astype(np.float32, copy=False)
            if settings := configs.get(component):
                _set_config(module, settings, match["module"])
    for component, modules in adapter.modules.items():
        for name in [name for name, module in modules.items() if not module.is_complete]:
            adapter.unmatched.append(f"{component}.{name}")
            del modules[name]
    if not any(adapter.modules.values()):
        raise InputError(f"{label} is no LoRA: none of its tensors is a pair of up and down matrices.")
    return adapter


def _split_original_modules(adapter: LoraAdapter, config: Mapping[str, Any]) -> None:
    """Replace modules of a transformer in its original names by the modules of diffusers that they are.

    Those of a joined matrix have its `down` and their rows of `up`. Raises ValueError for kinds that cannot be split.
    """
    modules = adapter.modules.get("transformer", {})
    originals = {name.replace(".", "_"): parts for name, parts in original_modules(config).items()}
    for name in [name for name in modules if name in originals]:
        module, parts = modules.pop(name), originals[name]
        for part in parts:
            is_whole = part.start is None and not part.swapped
            split = module if is_whole else replace(module, tensors=_rows_of(module, part, name))
            modules[part.module.replace(".", "_")] = split
    for name in [name for name in modules if re.fullmatch(r"single_transformer_blocks_\d+_attn_to_out_0", name)]:
        modules[name.removesuffix("_0")] = modules.pop(name)  # FLUX.2 has no list of layers there


def _rows_of(module: LoraModule, part: RowSlice, name: str) -> dict[str, np.ndarray]:
    """Return the tensors of a module for some rows of its weight."""
    by_rows = {"up", "up_bias", "diff", "diff_b", "output_magnitude"}
    if unsupported := module.tensors.keys() - by_rows - {"down"}:
        kind = sorted(unsupported)[0]
        raise ValueError(f"{name} is a joined matrix, of which {kind} cannot be split: use the LoRA in diffusers")

    def rows(tensor: np.ndarray) -> np.ndarray:
        if part.swapped:
            return np.concatenate([tensor[len(tensor) // 2 :], tensor[: len(tensor) // 2]])
        return tensor[part.start : part.stop]

    return {key: rows(tensor) if key in by_rows else tensor for key, tensor in module.tensors.items()}


def lora_label(source: str | Path | Weights) -> str:
    """Return the name of a LoRA in messages."""
    return "the dict" if isinstance(source, Mapping) else str(source)


def _read_tensors(
    source: str | Path | Weights, denoiser: str
) -> tuple[dict[str, np.ndarray], dict[str, dict[str, Any]]]:
    """Return the tensors by name, and PEFT's config by component.

    diffusers stores the configs in the file's metadata. PEFT stores that of the `denoiser` beside
    adapter_model.safetensors.
    """
    if isinstance(source, Mapping):
        return {n: np.asarray(t.float().cpu() if hasattr(t, "cpu") else t) for n, t in source.items()}, {}
    path = Path(source)
    if path.suffix != ".safetensors":
        raise InputError(f"{path} is not a .safetensors file: LoRAs are read from those alone, pickles can run code.")
    configs: dict[str, dict[str, Any]] = {}
    tensors, texts = read_float32(path)
    for name, value in json.loads(texts.get("lora_adapter_metadata", "{}")).items():
        component, _, key = name.partition(".")
        configs.setdefault(component, {})[key] = value
    peft = path.with_name("adapter_config.json")
    if path.name == "adapter_model.safetensors" and peft.is_file():
        configs[denoiser] = read_json(peft, root=peft.parent)
    for component, config in configs.items():
        _set_config(LoraModule(), config, "", f"{path}: the metadata of {component}")
    return tensors, configs


def _set_config(module: LoraModule, config: Mapping[str, Any], name: str, label: str = "") -> None:
    """Set alpha and rank of the module `name` (dotted) from PEFT's config, as PEFT finds them.

    A pattern is a regular expression that matches the end of a module's name; the first that matches counts. Raises
    InputError if the config has values of other types.
    """

    def find(pattern_key: str, *default_keys: str) -> float | None:
        patterns = config.get(pattern_key) or {}
        if any(len(re.findall(r"[*+{?]", pattern)) > 2 for pattern in patterns):
            raise ValueError(f"{pattern_key} has a pattern that may take for ever")
        values = [value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", name)]
        values += [config[key] for key in default_keys if config.get(key) is not None]
        return float(values[0]) if values else None

    try:
        module.alpha = find("alpha_pattern", "lora_alpha", "alpha")
        module.rank = find("rank_pattern", "r")
        module.rslora = bool(config.get("use_rslora"))
        module._scale(1.0)
    except (AttributeError, TypeError, ValueError, ZeroDivisionError, re.error) as error:
        raise InputError(f"{label} is no config of a LoRA ({first_line(error)}): get the file again.") from error


def _diffusers_name(name: str, layers: int) -> str:
    """Return a Kohya name with the UNet's module in diffusers' names. `layers`: the UNet's layers_per_block."""
    if not name.startswith("lora_unet_"):
        return name
    module, dot, end = name.removeprefix("lora_unet_").partition(".")
    if module not in LDM_MODULES and (match := LDM_BLOCK.match(module)):
        way, number, inner, rest = match["way"], int(match["number"] or 0), int(match["inner"]), match["rest"]
        block, layer = divmod(number - (way == "input"), layers + 1)
        if way == "middle":
            parent = f"mid_block_{('resnets_0', 'attentions_0', 'resnets_1')[inner]}"
        elif rest == "op":
            parent = f"down_blocks_{block}_downsamplers_0"
        elif rest == "conv":
            parent = f"up_blocks_{block}_upsamplers_0"
        else:
            parent = f"{'down' if way == 'input' else 'up'}_blocks_{block}_{('resnets', 'attentions')[inner]}_{layer}"
        module = f"{parent}_{LDM_MODULES.get(rest, rest)}"
    return f"lora_unet_{LDM_MODULES.get(module, module)}{dot}{end}"
