"""3x3 filters transformed for Winograd's F(2 x 2, 3 x 3): `sd_ort::winograd_filters`."""

from __future__ import annotations

import torch

from custom_ops.operators.winograd_filters.cases import Params
from sd_ort.torch.kernels import DTYPE_CODES, kernels_for
from sd_ort.torch.operators.registration import Operator, pointer, require

Tensor = torch.Tensor

_G = ((1.0, 0.0, 0.0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0.0, 0.0, 1.0))
UPSAMPLED_ROWS = (0, 1, 3)  # rows of the transforms that are not 0 for an input upsampled 2x


def _fallback(weight: Tensor, upsample_2x: bool) -> Tensor:
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    g = wide.new_tensor(_G)[list(UPSAMPLED_ROWS) if upsample_2x else slice(None)]
    return torch.einsum("ai,mcij,bj->abmc", g, wide, g).flatten(0, 1).to(weight.dtype).contiguous()


def _fake(weight: Tensor, upsample_2x: bool) -> Tensor:
    return weight.new_empty((9 if upsample_2x else 16, *weight.shape[:2]))


def _launch(weight: Tensor, upsample_2x: bool) -> Tensor:
    kernels = kernels_for(weight)
    require(weight.ndim == 4 and weight.shape[2:] == (3, 3), "the weight is not 3 x 3")
    y = _fake(weight, upsample_2x)
    weight = weight.permute(0, 2, 3, 1).contiguous()
    if y.numel():
        filters, _, _, channels = weight.shape
        dtype = DTYPE_CODES[weight.dtype]
        params = Params(dtype, pointer(weight), pointer(y), filters, channels, int(upsample_2x))
        kernels.run("WinogradFilters", params, weight.device)
    return y


_OPERATOR = Operator(
    "winograd_filters", "(Tensor weight, bool upsample_2x) -> Tensor", _fallback, _launch,
    fake=_fake, autocast="widest",
).define()  # fmt: skip


def winograd_filters(weight: Tensor, upsample_2x: bool = False) -> Tensor:
    """Return the filters (16, M, C) for `nhwc_winograd` of a convolution's weight (M, C, 3, 3).

    upsample_2x: the input of the convolution is upsampled 2x (nearest) first; the filters are (9, M, C) then. They are
    computed in float32 at least and rounded once.
    """
    return _OPERATOR(weight, upsample_2x)
