"""diffusers' sinusoidal embedding of timesteps in a form that exporters leave unchanged."""

from __future__ import annotations

import math
from typing import Any

import torch


class SinusoidalEmbedding(torch.nn.Module):
    """diffusers' `Timesteps` with the frequencies as a buffer.

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
