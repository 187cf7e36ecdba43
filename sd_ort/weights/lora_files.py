"""Parser of LoRA files: low-rank deltas by component and module.

formats   diffusers and PEFT (lora_A, lora_B; lora.down, lora.up), Kohya (lora_unet_..., with alpha)
modules   linear layers and convolutions (LoCon) of the UNet and the text encoders
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from sd_ort.core.errors import InputError
from sd_ort.core.files import parsing
from sd_ort.core.safetensors_file import read_float32

Weights = Mapping[str, Any]

# Component by prefix of a tensor name. Names without a prefix are the UNet's.
PREFIXES = {
    "lora_unet_": "unet", "lora_te1_": "text_encoder", "lora_te2_": "text_encoder_2", "lora_te_": "text_encoder",
    "unet.": "unet", "text_encoder_2.": "text_encoder_2", "text_encoder.": "text_encoder",
}  # fmt: skip
TENSOR_NAME = re.compile(
    r"(?P<module>.+?)(?:[._]lora)?[._](?:(?P<down>lora_down|lora_A|down)|(?P<up>lora_up|lora_B|up))"
    r"(?:\.default(?:_0)?)?\.weight$"
)


@dataclass(frozen=True)
class LowRankDelta:
    """The delta (up * scale) @ down of a tensor of `shape` (out, in, ...), float32.

    `up`: (out, R). `down`: (R, in * ...). `scale`: (R,). `modules`: the LoRA modules whose `up` and `down` it has, in
    their order: deltas of the same modules differ in `scale` alone.
    """

    up: np.ndarray
    down: np.ndarray
    shape: tuple[int, ...]
    scale: np.ndarray
    modules: tuple[object, ...] = ()

    @property
    def scaled_up(self) -> np.ndarray:
        """up * scale."""
        return self.up * self.scale

    def dense(self) -> np.ndarray:
        """Return the delta as one array of `shape`."""
        return (self.scaled_up @ self.down).reshape(self.shape)

    def transposed(self) -> LowRankDelta:
        """Return the delta of the transposed matrix."""
        return LowRankDelta(self.down.T, self.scaled_up.T, self.shape[::-1], np.ones_like(self.scale))

    def zero(self) -> LowRankDelta:
        """Return a zero delta of the same shape and rank 1."""
        up, down = np.zeros_like(self.up[:, :1]), np.zeros_like(self.down[:1])
        return LowRankDelta(up, down, self.shape, np.ones(1, np.float32))

    def __add__(self, other: LowRankDelta) -> LowRankDelta:
        if self.shape != other.shape:
            raise ValueError(f"{list(other.shape)} instead of {list(self.shape)}")
        up, down = np.hstack([self.up, other.up]), np.vstack([self.down, other.down])
        scale = np.concatenate([self.scale, other.scale])
        return LowRankDelta(up, down, self.shape, scale, (*self.modules, *other.modules))


@dataclass
class LoraModuleWeights:
    """LoRA tensors of one module: up (out, rank[, 1, 1]) and down (rank, in[, h, w]), float32, and alpha."""

    down: np.ndarray | None = None
    up: np.ndarray | None = None
    alpha: float | None = None

    def delta(self, adapter_scale: float = 1.0) -> LowRankDelta:
        """Return the delta of the module's weight."""
        assert self.up is not None
        assert self.down is not None
        rank = self.down.shape[0]
        scale = adapter_scale * (1.0 if self.alpha is None else self.alpha / rank)
        out, *_ = self.up.shape
        return LowRankDelta(
            self.up.reshape(out, -1), self.down.reshape(rank, -1), (out, *self.down.shape[1:]),
            np.full(rank, scale, np.float32), (self,),
        )  # fmt: skip


@dataclass
class LoraAdapter:
    """A parsed LoRA: weights by component and module name (with underscores); `unmatched`: names that are no LoRA's."""

    modules: dict[str, dict[str, LoraModuleWeights]] = field(default_factory=dict)
    unmatched: list[str] = field(default_factory=list)

    def module(self, component: str, name: str) -> LoraModuleWeights:
        """Return the weights of a module, which any format names; adds it if it is new."""
        name = name.replace(".processor", "").replace(".lora_linear_layer", "").replace(".", "_")
        name = re.sub(r"_lora$", "", name).removeprefix("text_model_")
        name = re.sub(r"_to_out$", "_to_out_0", name)
        return self.modules.setdefault(component, {}).setdefault(name, LoraModuleWeights())


def read_adapter(source: str | Path | Weights, unet_config: Mapping[str, Any]) -> LoraAdapter:
    """Parse a .safetensors file or a dict of tensors. Raises InputError if it is invalid or no LoRA."""
    with parsing(lora_label(source), "a LoRA"):
        return _parse(source, unet_config)


def _parse(source: str | Path | Weights, unet_config: Mapping[str, Any]) -> LoraAdapter:
    tensors, alphas = _read_tensors(source)
    label = lora_label(source)
    if invalid := next((name for name, tensor in tensors.items() if not np.isfinite(tensor).all()), None):
        raise InputError(f"{label}: {invalid} holds NaN or infinity: get it again.")
    if any(re.match(r"lora_unet_(input|output)_blocks", name) for name in tensors):
        tensors = _with_diffusers_names(tensors, unet_config)
    adapter = LoraAdapter()
    for name, tensor in tensors.items():
        prefix = next((p for p in PREFIXES if name.startswith(p)), "")
        component, rest = PREFIXES.get(prefix, "unet"), name.removeprefix(prefix)
        if rest.endswith(".alpha"):
            adapter.module(component, rest.removesuffix(".alpha")).alpha = float(np.asarray(tensor))
        elif match := TENSOR_NAME.match(rest):
            module = adapter.module(component, match["module"])
            setattr(module, "down" if match["down"] else "up", tensor.astype(np.float32))
            if module.alpha is None:
                module.alpha = alphas.get(component)
        else:
            adapter.unmatched.append(name)
    for component, modules in adapter.modules.items():
        for name in [name for name, module in modules.items() if module.down is None or module.up is None]:
            adapter.unmatched.append(f"{component}.{name}")
            del modules[name]
    if not any(adapter.modules.values()):
        raise InputError(f"{label} is no LoRA: none of its tensors is a pair of up and down matrices.")
    return adapter


def lora_label(source: str | Path | Weights) -> str:
    """Return the name of a LoRA in messages."""
    return "the dict" if isinstance(source, Mapping) else str(source)


def _read_tensors(source: str | Path | Weights) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Return the tensors by name, and alpha by component from PEFT's metadata."""
    if isinstance(source, Mapping):
        return {n: np.asarray(t.float().cpu() if hasattr(t, "cpu") else t) for n, t in source.items()}, {}
    path = Path(source)
    if path.suffix != ".safetensors":
        raise InputError(f"{path} is not a .safetensors file: LoRAs are read from those alone, pickles can run code.")
    tensors, texts = read_float32(path)
    metadata = json.loads(texts.get("lora_adapter_metadata", "{}"))
    return tensors, {n.removesuffix(".lora_alpha"): float(a) for n, a in metadata.items() if n.endswith(".lora_alpha")}


def _with_diffusers_names(tensors: dict[str, np.ndarray], unet_config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Rename the blocks of an SDXL LoRA from LDM's names, with diffusers' own mapping."""
    from diffusers.loaders import lora_conversion_utils as conversion

    return dict(conversion._maybe_map_sgm_blocks_to_diffusers(dict(tensors), SimpleNamespace(**unet_config)))
