"""Weight of 2x upsampling and a 3x3 convolution as one transposed convolution: `sd_ort::upsample_conv_weight`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from custom_ops.operators.upsample_conv_weight.cases import Params
from sd_ort.torch.kernels import DTYPE_CODES, kernels_for
from sd_ort.torch.operators.registration import Operator, pointer, register_alias, require

Tensor = torch.Tensor


def _fallback(weight: Tensor) -> Tensor:
    wide = weight.flip(2, 3).transpose(0, 1).to(torch.promote_types(weight.dtype, torch.float32))
    padded = F.pad(wide, (1, 1, 1, 1))
    rows = padded[:, :, 1:] + padded[:, :, :-1]
    return (rows[..., 1:] + rows[..., :-1]).to(weight.dtype)


def _fake(weight: Tensor) -> Tensor:
    filters, channels = weight.shape[:2]
    return weight.new_empty((channels, 4, 4, filters)).permute(0, 3, 1, 2)


def _launch(weight: Tensor) -> Tensor:
    kernels = kernels_for(weight)
    require(weight.ndim == 4 and weight.shape[2:] == (3, 3), "the weight is not 3 x 3")
    weight = weight.permute(0, 2, 3, 1).contiguous()
    y = _fake(weight.permute(0, 3, 1, 2))
    if y.numel():
        filters, _, _, channels = weight.shape
        params = Params(DTYPE_CODES[weight.dtype], pointer(weight), pointer(y), filters, channels)
        kernels.run("UpsampleConvWeight", params, weight.device)
    return y


_OPERATOR = Operator(
    "upsample_conv_weight", "(Tensor weight) -> Tensor", _fallback, _launch,
    fake=_fake, autocast="widest",
).define()  # fmt: skip


register_alias("doubled_weight", _OPERATOR, schema="(Tensor weight) -> Tensor")


def upsample_conv_weight(weight: Tensor) -> Tensor:
    """Return the weight (C, M, 4, 4), channels last, of a transposed convolution with stride 2 and padding 1.

    It equals nearest 2x upsampling followed by a convolution with `weight` (M, C, 3, 3) and padding 1.
    """
    return _OPERATOR(weight)
