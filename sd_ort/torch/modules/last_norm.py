"""Last GroupNorm of a UNet or VAE and its SiLU, as one operator."""

from __future__ import annotations

import torch
from torch import nn

from sd_ort.torch.operators.group_norm import group_norm


class GroupNormSilu(nn.GroupNorm):
    """GroupNorm followed by SiLU."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input (N, C, ...)."""
        return group_norm(input, self.weight, self.bias, self.num_groups, self.eps, silu=True)


class FusedSilu(nn.SiLU):
    """Identity in the place of the SiLU that GroupNormSilu applies."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input of any shape."""
        return input


def unsupported_reason(model: nn.Module) -> str | None:
    """Return why conv_norm_out and conv_act of a model cannot be replaced, or None."""
    if type(model.conv_norm_out) is not nn.GroupNorm or type(model.conv_act) is not nn.SiLU:
        return "its last norm is not GroupNorm and SiLU"
    return None if model.conv_norm_out.weight is not None else "its last norm has no weights"
