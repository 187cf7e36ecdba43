"""Parts that the modules for the exporters share: their base, the mask of text and the embedding of timesteps."""

from __future__ import annotations

import math
from typing import Any

import torch


class ModelWrapper(torch.nn.Module):
    """Base of the modules whose `forward` has the inputs and outputs of an ONNX graph."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model


def causal_mask_and_positions(attention_mask: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the additive attention mask [B, 1, S, S] of `dtype`, and the positions [B, S] of tokens.

    Prompts are padded on the right. A token attends to the tokens up to itself that `attention_mask` [B, S] has.
    """
    batch, length = attention_mask.shape
    tokens = torch.arange(length, device=attention_mask.device)
    attends = (tokens[None, :] <= tokens[:, None])[None, None] & attention_mask.bool()[:, None, None, :]
    mask = torch.zeros_like(attends, dtype=dtype).masked_fill(~attends, torch.finfo(dtype).min)
    # A row of positions for each prompt: ONNX Runtime's RotaryEmbedding takes no tables of one row for several.
    return mask, tokens[None].expand(batch, length)


class SinusoidalEmbedding(torch.nn.Module):
    """diffusers' `Timesteps`, the sinusoidal embedding of timesteps, with the frequencies as a buffer.

    Exporters fold the frequencies with NumPy's Exp, whose last bit differs from torch's. FLUX.1 multiplies them by
    guidance * 1000, so outputs differed by an NMSE of 4e-10 instead of 2e-13.
    """

    frequencies: torch.Tensor

    def __init__(self, timesteps: Any) -> None:
        super().__init__()
        half = timesteps.num_channels // 2
        exponents = -math.log(10000) * torch.arange(half, dtype=torch.float32) / (half - timesteps.downscale_freq_shift)
        self.register_buffer("frequencies", torch.exp(exponents) * timesteps.scale, persistent=False)
        self.flip_sin_to_cos = timesteps.flip_sin_to_cos

    def forward(self, timesteps: torch.Tensor) -> torch.Tensor:
        angles = timesteps[:, None].float() * self.frequencies
        halves = (torch.sin(angles), torch.cos(angles))
        return torch.cat(halves[::-1] if self.flip_sin_to_cos else halves, dim=-1)
