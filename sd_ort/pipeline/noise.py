"""Standard normal noise, drawn in diffusers' order: one generator for all images, or one for each."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def draw_noise(shape: Sequence[int], generator: torch.Generator | Sequence[torch.Generator] | None) -> torch.Tensor:
    """Noise (B, ...), float32, on the CPU. `generator`: one, a list of B, or None for torch's global one."""
    if isinstance(generator, Sequence):
        return torch.cat([torch.randn((1, *shape[1:]), generator=each) for each in generator])
    return torch.randn(tuple(shape), generator=generator)
