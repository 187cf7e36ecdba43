"""Pixels doubled and then convolved, as one transposed convolution of the image before: 4/9 of the arithmetic.

Of the nine pixels of a doubled image that one of the result reads, many are copies of one: sums of taps do. They are
summed at every call, as weights may have changed since the last.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from sd_ort.torch import kernels
from sd_ort.torch.modules import parts
from sd_ort.torch.operators import doubled_weight
from sd_ort.torch.operators.group_norm import is_channels_last

Tensor = torch.Tensor

FEWEST_PIXELS = 512  # of a batch, before it is doubled; of fewer, summing the taps costs what it saves


def pays(x: Tensor) -> bool:
    """Whether it is faster for x (N, C, H, W). On an H200, doubling and the convolution behind, in us: SD 1.5 104 to 88
    and 111 to 64, SDXL 357 to 236 and 386 to 202, the VAE's last 631 to 300.
    """
    if x.device.type != "cuda" or x.dtype == torch.float32 or not kernels.is_hopper_or_newer(x.device):
        return False
    return is_channels_last(x) and x.shape[0] * x.shape[2] * x.shape[3] >= FEWEST_PIXELS


def takes(layer: nn.Module, x: Tensor) -> bool:
    """Whether `conv` is to run torch's own layer: 3 x 3 filters that move by one, and nothing to be learned."""
    return not torch.is_grad_enabled() and parts.is_three_by_three(layer) and pays(x)


def conv(layer: nn.Module, x: Tensor) -> Tensor:
    """`layer` of x (N, C, H, W) with every pixel doubled down and across: (N, M, 2 H, 2 W)."""
    weight = doubled_weight(layer.weight)  # type: ignore[arg-type]
    return parts.biased(F.conv_transpose2d(x, weight, stride=2, padding=1), layer.bias)  # type: ignore[arg-type]
