"""Upsample2D: nearest 2x upsampling and the 3x3 convolution after it, as two operators or fused into one.

Fused, by Winograd's algorithm (winograd.py) or as one transposed convolution of the input, with 4/9 of the arithmetic:
several of the nine upsampled pixels under a filter are copies of one input pixel, so the filter's taps are summed. They
are summed at every call, since the weights may have changed since the last one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers.models.upsampling import Upsample2D
from torch import nn

from sd_ort.torch import kernels
from sd_ort.torch.modules import layer_ops, winograd
from sd_ort.torch.operators import upsample_conv_weight, upsample_nearest
from sd_ort.torch.operators.group_norm import is_channels_last

Tensor = torch.Tensor

MIN_PIXELS = 512  # of a batch, before upsampling; for fewer pixels, summing the taps costs what it saves


class FastUpsample2D(Upsample2D):
    """Upsample2D whose nearest upsampling is one operator."""

    def forward(self, hidden_states: Tensor, output_size: object = None, *args: object, **kwargs: object) -> Tensor:
        """As in diffusers; with an `output_size`, diffusers' own code."""
        if output_size is not None:
            return super().forward(hidden_states, output_size, *args, **kwargs)
        x = upsample_nearest(hidden_states)
        return self.convolution(x) if self.use_conv else x

    @property
    def convolution(self) -> nn.Module:
        """The convolution after the upsampling; only if `use_conv`."""
        return self.conv if self.name == "conv" else self.Conv2d_0


class FusedUpsampleConv2D(winograd.WinogradFilterMixin, FastUpsample2D):
    """Upsample2D with the upsampling fused into the convolution where that is faster."""

    def forward(self, hidden_states: Tensor, output_size: object = None, *args: object, **kwargs: object) -> Tensor:
        if output_size is None and self.use_conv:
            layer = self.convolution
            y = winograd.conv(layer, hidden_states, upsample_2x=True)
            if y is not None:
                return y
            if is_supported(layer, hidden_states):
                return transposed_conv(layer, hidden_states)
        return super().forward(hidden_states, output_size, *args, **kwargs)


def transposed_conv(layer: nn.Module, x: Tensor) -> Tensor:
    """Return `layer` of x (N, C, H, W) after nearest 2x upsampling, (N, M, 2 H, 2 W), by a transposed convolution."""
    weight = upsample_conv_weight(layer.weight)  # type: ignore[arg-type]
    return layer_ops.add_bias(F.conv_transpose2d(x, weight, stride=2, padding=1), layer.bias)  # type: ignore[arg-type]


def is_supported(layer: nn.Module, x: Tensor) -> bool:
    """Return whether to run an unmodified 3x3 convolution of stride 1 by `transposed_conv`; never with gradients."""
    return not torch.is_grad_enabled() and layer_ops.is_conv3x3(layer) and is_faster(x)


def is_faster(x: Tensor) -> bool:
    """Return whether `transposed_conv` is faster for x (N, C, H, W).

    Upsampling and convolution on an H200, in us: SD 1.5 104 to 88 and 111 to 64, SDXL 357 to 236 and 386 to 202, the
    last one of the VAE 631 to 300.
    """
    if x.device.type != "cuda" or x.dtype == torch.float32 or not kernels.is_hopper_or_newer(x.device):
        return False
    return is_channels_last(x) and x.shape[0] * x.shape[2] * x.shape[3] >= MIN_PIXELS


def unsupported_reason(layer: Upsample2D) -> str | None:
    """Return why a layer cannot be replaced, or None."""
    is_nearest = layer.interpolate and layer.norm is None and not layer.use_conv_transpose
    return None if is_nearest else "it does more than nearest upsampling"
