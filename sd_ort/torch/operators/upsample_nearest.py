"""Nearest upsampling by whole factors: `sd_ort::upsample_nearest`."""

from __future__ import annotations

import torch

from custom_ops.operators.upsample_nearest.cases import Params
from sd_ort.torch.kernels import DTYPE_CODES, kernels_for
from sd_ort.torch.operators.group_norm import is_channels_last
from sd_ort.torch.operators.registration import Operator, pointer, require

Tensor = torch.Tensor


def _fallback(x: Tensor, down: int, across: int) -> Tensor:
    # F.interpolate rejects empty images and has 32-bit indices.
    n, c, h, w = x.shape
    return x[:, :, :, None, :, None].expand(n, c, h, down, w, across).reshape(n, c, h * down, w * across).clone()


def _fake(x: Tensor, down: int, across: int) -> Tensor:
    n, c, h, w = x.shape
    if is_channels_last(x):
        return x.new_empty((n, h * down, w * across, c)).movedim(-1, 1)
    return x.new_empty((n, c, h * down, w * across))


def _launch(x: Tensor, down: int, across: int) -> Tensor:
    kernels = kernels_for(x)
    require(down > 0 and across > 0, "a scale below 1")
    last = is_channels_last(x)
    x = x if last else x.contiguous()
    y = _fake(x, down, across)
    n, c, h, w = x.shape
    rows, channels = (n * h, c) if last else (n * c * h, 1)
    if y.numel():
        params = Params(DTYPE_CODES[x.dtype], pointer(x), pointer(y), rows, w, channels, down, across)
        kernels.run("UpsampleNearest", params, x.device)
    return y


_OPERATOR = Operator(
    "upsample_nearest", "(Tensor x, int down, int across) -> Tensor", _fallback, _launch,
    fake=_fake, autocast="widest",
).define()  # fmt: skip


def upsample_nearest(x: Tensor, down: int = 2, across: int = 2) -> Tensor:
    """Repeat every pixel of x (N, C, H, W): (N, C, H * down, W * across), channels last if x is."""
    return _OPERATOR(x, down, across)
