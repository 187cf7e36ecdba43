"""LoRA files: what they say of which module.

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

from sd_ort.core.errors import InputError, first_line

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


@dataclass(frozen=True)
class LowRank:
    """The change up (out, R) @ down (R, in * ...) of a tensor of `shape` (out, in, ...); float32."""

    up: np.ndarray
    down: np.ndarray
    shape: tuple[int, ...]

    def dense(self) -> np.ndarray:
        """The product, of `shape`."""
        return (self.up @ self.down).reshape(self.shape)

    def transposed(self) -> LowRank:
        """Of a matrix's transpose."""
        return LowRank(self.down.T, self.up.T, self.shape[::-1])

    def zero(self) -> LowRank:
        """No change of a tensor of the same shape."""
        return LowRank(np.zeros_like(self.up[:, :1]), np.zeros_like(self.down[:1]), self.shape)

    def __add__(self, other: LowRank) -> LowRank:
        if self.shape != other.shape:
            raise ValueError(f"{list(other.shape)} instead of {list(self.shape)}")
        return LowRank(np.hstack([self.up, other.up]), np.vstack([self.down, other.down]), self.shape)


@dataclass
class Correction:
    """Of one module: up (out, rank[, 1, 1]) and down (rank, in[, h, w]), float32, and alpha."""

    down: np.ndarray | None = None
    up: np.ndarray | None = None
    alpha: float | None = None

    def change(self, strength: float = 1.0) -> LowRank:
        """What is added to the module's weight at a strength."""
        assert self.up is not None
        assert self.down is not None
        rank = self.down.shape[0]
        scale = strength * (1.0 if self.alpha is None else self.alpha / rank)
        up = self.up.reshape(self.up.shape[0], -1) * np.float32(scale)
        return LowRank(up, self.down.reshape(rank, -1), (self.up.shape[0], *self.down.shape[1:]))


@dataclass
class Adapter:
    """A LoRA: component -> module's name with underscores -> correction; `left` are names it could not read."""

    modules: dict[str, dict[str, Correction]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)


def read_adapter(source: str | Path | Weights, unet_config: Mapping[str, Any]) -> Adapter:
    """A LoRA from a .safetensors file or a dict of tensors. Raises InputError for a file that is none, or broken."""
    tensors, alphas = _tensors(source)
    if broken := next((name for name, tensor in tensors.items() if not np.isfinite(tensor).all()), None):
        raise InputError(f"{described(source)}: {broken} holds NaN or infinity: get it again.")
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
        raise InputError(f"{described(source)} is no LoRA: none of its tensors is a pair of up and down matrices.")
    return adapter


def _correction(adapter: Adapter, component: str, module: str) -> Correction:
    name = module.replace(".processor", "").replace(".lora_linear_layer", "").replace(".", "_")
    name = re.sub(r"_lora$", "", name).removeprefix("text_model_")
    name = re.sub(r"_to_out$", "_to_out_0", name)
    return adapter.modules.setdefault(component, {}).setdefault(name, Correction())


def described(source: str | Path | Weights) -> str:
    """How a message names a LoRA."""
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
