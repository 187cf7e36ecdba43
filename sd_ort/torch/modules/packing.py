"""Weights of one input's products laid side by side in memory, so that the products can run as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from diffusers.models.attention_processor import Attention
from torch import nn

from sd_ort.torch.modules import parts


def lay_side_by_side(weights: Sequence[nn.Parameter]) -> None:
    """Moves parameters (N, K) into one block of memory. They stay the same objects, and a state dict the same."""
    block = torch.cat([weight.data for weight in weights])
    for weight, rows in zip(weights, block.split([len(weight) for weight in weights]), strict=True):
        weight.data = rows


def products(attn: Attention) -> list[nn.Parameter]:
    """The weights that read one input: query, key and value of self-attention, key and value of cross-attention."""
    layers = (attn.to_k, attn.to_v) if attn.is_cross_attention else (attn.to_q, attn.to_k, attn.to_v)
    if not all(parts.is_plain(layer, nn.Linear) and layer.bias is None for layer in layers):
        return []
    return [layer.weight for layer in layers]


def give_own_memory(weights: Sequence[nn.Parameter]) -> None:
    """The reverse."""
    for weight in weights:
        weight.data = weight.data.clone()
