"""Weights for images that are doubled before they are convolved: `sd_ort::doubled_weight`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from custom_ops.doubled_weight.cases import Params
from sd_ort.torch import kernels
from sd_ort.torch.operators.contract import Operator, pointer, require

Tensor = torch.Tensor


def _plain(weight: Tensor) -> Tensor:
    wide = weight.flip(2, 3).transpose(0, 1).to(torch.promote_types(weight.dtype, torch.float32))
    padded = F.pad(wide, (1, 1, 1, 1))
    rows = padded[:, :, 1:] + padded[:, :, :-1]
    return (rows[..., 1:] + rows[..., :-1]).to(weight.dtype)


def _fake(weight: Tensor) -> Tensor:
    filters, channels = weight.shape[:2]
    return weight.new_empty((channels, 4, 4, filters)).permute(0, 3, 1, 2)


def _launch(weight: Tensor) -> Tensor:
    found = kernels.of(weight)
    require(weight.ndim == 4 and weight.shape[2:] == (3, 3), "the weight is not 3 x 3")
    weight = weight.permute(0, 2, 3, 1).contiguous()
    y = _fake(weight.permute(0, 3, 1, 2))
    if y.numel():
        filters, _, _, channels = weight.shape
        params = Params(kernels.NUMBERS[weight.dtype], pointer(weight), pointer(y), filters, channels)
        found.run("DoubledWeight", params, weight.device)
    return y


_OPERATOR = Operator(
    name="doubled_weight",
    schema="(Tensor weight) -> Tensor",
    plain=_plain,
    launch=_launch,
    fake=_fake,
    autocast="widest",
).define()


def doubled_weight(weight: Tensor) -> Tensor:
    """The weight (C, M, 4, 4) of a transposed convolution, of stride 2 and padding 1, that makes of an image what a
    convolution with `weight` (M, C, 3, 3) and padding 1 makes of the image with every pixel doubled. Channels last.
    """
    return _OPERATOR(weight)
