"""Tiny IP-Adapters with random weights, in the layout of the published files, and their image encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sd_ort.family.checkpoints import model_class
from sd_ort.family.presets import PRESETS

ENCODER = {"hidden_size": 24, "projection_dim": 20, "image_size": 32, "patch_size": 16}
TOKENS, DEPTH, INNER, HEAD = 4, 4, 32, 64  # diffusers takes adapters of 4 tokens, and of Plus any number, in 4 blocks


def make_encoder(folder: Path) -> Path:
    """A CLIP that sees 2 x 2 patches."""
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    torch.manual_seed(11)
    small = {"intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    CLIPVisionModelWithProjection(CLIPVisionConfig(**ENCODER, **small)).save_pretrained(folder)
    return folder


def weights(preset: str, plus: bool = False) -> dict[str, torch.Tensor]:
    """Those of an adapter for a preset's UNet."""
    config = PRESETS[preset].models["unet"]
    with torch.device("meta"):
        unet = model_class("UNet2DConditionModel").from_config(config)
    context, random = config["cross_attention_dim"], torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random) * shape[-1] ** -0.5

    def norm(name: str, width: int) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": 1 + 0.1 * normal(width), f"{name}.bias": 0.1 * normal(width)}

    def linear(name: str, out: int, width: int) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": normal(out, width), f"{name}.bias": 0.1 * normal(out)}

    made: dict[str, torch.Tensor] = {}
    if not plus:
        made = linear("proj", TOKENS * context, ENCODER["projection_dim"]) | norm("norm", context)
    else:
        made = {"latents": normal(1, TOKENS + 2, INNER)}
        made |= linear("proj_in", INNER, ENCODER["hidden_size"]) | linear("proj_out", context, INNER)
        made |= norm("norm_out", context)
        for i in range(DEPTH):
            made |= norm(f"layers.{i}.0.norm1", INNER) | norm(f"layers.{i}.0.norm2", INNER)
            made |= {
                f"layers.{i}.0.to_q.weight": normal(HEAD, INNER),
                f"layers.{i}.0.to_kv.weight": normal(2 * HEAD, INNER),
            }
            made |= {f"layers.{i}.0.to_out.weight": normal(INNER, HEAD)} | norm(f"layers.{i}.1.0", INNER)
            made |= {
                f"layers.{i}.1.1.weight": normal(4 * INNER, INNER),
                f"layers.{i}.1.3.weight": normal(INNER, 4 * INNER),
            }
    file = {f"image_proj.{name}": tensor for name, tensor in made.items()}
    layers = [name for name in unet.attn_processors if name.endswith("attn2.processor")]
    for i, name in enumerate(layers):
        width = unet.get_submodule(name.removesuffix(".processor")).to_q.out_features
        file |= {f"ip_adapter.{2 * i + 1}.to_{part}_ip.weight": normal(width, context) for part in "kv"}
    return file


def make_adapter(folder: Path, preset: str, plus: bool = False, **changes: Any) -> Path:
    """An adapter's file; `changes`: tensors in place of others, with dots as `__`, None to leave one out."""
    from safetensors.torch import save_file

    made = weights(preset, plus) | {name.replace("__", "."): tensor for name, tensor in changes.items()}
    path = folder / f"{preset}{'-plus' if plus else ''}.safetensors"
    save_file({name: tensor for name, tensor in made.items() if tensor is not None}, path)
    return path


def make_lora(folder: Path) -> Path:
    from safetensors.torch import save_file

    save_file({"lora_unet_a.lora_down.weight": torch.zeros(2, 2)}, folder / "lora.safetensors")
    return folder / "lora.safetensors"
