"""Filters of 3 x 3 as Winograd's F(2 x 2, 3 x 3) multiplies by them: `sd_ort::winograd_filters`."""

from __future__ import annotations

import torch

from custom_ops.winograd_filters.cases import Params
from sd_ort.torch import kernels
from sd_ort.torch.operators.contract import Operator, pointer, require

Tensor = torch.Tensor

_G = ((1.0, 0.0, 0.0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0.0, 0.0, 1.0))
OF_DOUBLED = (0, 1, 3)  # the rows of the transforms that are not 0 where images are doubled


def _plain(weight: Tensor, doubled: bool) -> Tensor:
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    g = wide.new_tensor(_G)[list(OF_DOUBLED) if doubled else slice(None)]
    return torch.einsum("ai,mcij,bj->abmc", g, wide, g).flatten(0, 1).to(weight.dtype).contiguous()


def _fake(weight: Tensor, doubled: bool) -> Tensor:
    return weight.new_empty((9 if doubled else 16, *weight.shape[:2]))


def _launch(weight: Tensor, doubled: bool) -> Tensor:
    found = kernels.of(weight)
    require(weight.ndim == 4 and weight.shape[2:] == (3, 3), "the weight is not 3 x 3")
    y = _fake(weight, doubled)
    weight = weight.permute(0, 2, 3, 1).contiguous()
    if y.numel():
        filters, _, _, channels = weight.shape
        number = kernels.NUMBERS[weight.dtype]
        params = Params(number, pointer(weight), pointer(y), filters, channels, int(doubled))
        found.run("WinogradFilters", params, weight.device)
    return y


_OPERATOR = Operator(
    name="winograd_filters",
    schema="(Tensor weight, bool doubled) -> Tensor",
    plain=_plain,
    launch=_launch,
    fake=_fake,
    autocast="widest",
).define()


def winograd_filters(weight: Tensor, doubled: bool = False) -> Tensor:
    """What `nhwc_winograd` takes of a convolution's weight (M, C, 3, 3): (16, M, C), or for images that it is to double
    first (9, M, C). Computed in float32 at least and rounded once.
    """
    return _OPERATOR(weight, doubled)
