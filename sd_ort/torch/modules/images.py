"""What stands between the blocks: the last GroupNorm with its SiLU, and nearest-neighbor upsampling."""

from __future__ import annotations

import torch
from diffusers.models.upsampling import Upsample2D
from torch import nn

from sd_ort.torch.modules import doubling, winograd
from sd_ort.torch.operators import group_norm, upsample_nearest


class GroupNormSilu(nn.GroupNorm):
    """A model's last GroupNorm, SiLU behind it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input (N, C, ...)."""
        return group_norm(input, self.weight, self.bias, self.num_groups, self.eps, silu=True)


class SiluDone(nn.SiLU):
    """The SiLU behind it, which has been applied."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input of any shape."""
        return input


class FastUpsample2D(Upsample2D):
    """Pixels repeated by our operator, then the convolution."""

    def forward(
        self, hidden_states: torch.Tensor, output_size: object = None, *args: object, **kwargs: object
    ) -> torch.Tensor:
        """As in diffusers; an `output_size` is diffusers' own."""
        if output_size is not None:
            return super().forward(hidden_states, output_size, *args, **kwargs)
        x = upsample_nearest(hidden_states)
        if not self.use_conv:
            return x
        return self.convolution(x)

    @property
    def convolution(self) -> nn.Module:
        """The layer behind, where there is one."""
        return self.conv if self.name == "conv" else self.Conv2d_0


class FoldedUpsample2D(winograd.KeepsFilters, FastUpsample2D):
    """Both at once where that pays (winograd.py, doubling.py)."""

    def forward(
        self, hidden_states: torch.Tensor, output_size: object = None, *args: object, **kwargs: object
    ) -> torch.Tensor:
        """As in diffusers."""
        if output_size is None and self.use_conv:
            layer = self.convolution
            y = winograd.conv(layer, hidden_states, doubled=True)
            if y is not None:
                return y
            if doubling.takes(layer, hidden_states):
                return doubling.conv(layer, hidden_states)
        return super().forward(hidden_states, output_size, *args, **kwargs)


def refuse_upsample(layer: Upsample2D) -> str | None:
    """Why a layer stays as it is."""
    plain = layer.interpolate and layer.norm is None and not layer.use_conv_transpose
    return None if plain else "it does more than repeat pixels"


def refuse_last_norm(model: nn.Module) -> str | None:
    """Why a model's conv_norm_out and conv_act stay as they are."""
    if type(model.conv_norm_out) is not nn.GroupNorm or type(model.conv_act) is not nn.SiLU:
        return "its last norm is not GroupNorm and SiLU"
    return None if model.conv_norm_out.weight is not None else "its last norm has no weights"
