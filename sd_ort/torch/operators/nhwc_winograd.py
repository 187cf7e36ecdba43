"""A 3 x 3 convolution with 4/9 of the multiplications, Winograd's F(2 x 2, 3 x 3): `sd_ort::nhwc_winograd`.

Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", arXiv 1509.09308.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from custom_ops.nhwc_winograd.cases import Params
from sd_ort.torch import kernels
from sd_ort.torch.operators.contract import Operator, one_dtype, pointer, require
from sd_ort.torch.operators.winograd_filters import OF_DOUBLED

Tensor = torch.Tensor

# of 4 x 4 pixels, and back from their products to 2 x 2
_B = ((1.0, 0.0, -1.0, 0.0), (0.0, 1.0, 1.0, 0.0), (0.0, -1.0, 1.0, 0.0), (0.0, 1.0, 0.0, -1.0))
_A = ((1.0, 1.0, 1.0, 0.0), (0.0, 1.0, -1.0, -1.0))


def _plain(x: Tensor, filters: Tensor, bias: Tensor | None, skip: Tensor | None) -> Tensor:
    doubled, (n, m, height, width) = _is_doubled(filters), _shape(x, filters)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    kept = list(OF_DOUBLED) if doubled else slice(None)
    b, a = wide.new_tensor(_B)[kept], wide.new_tensor(_A)[:, kept]
    if doubled:
        wide = wide.repeat_interleave(2, 2).repeat_interleave(2, 3)
    down, across = height // 2 + 1, width // 2 + 1  # tiles, which move by two pixels; enough for any size
    padded = F.pad(wide, (1, 2 * across + 1 - width, 1, 2 * down + 1 - height))
    tiles = padded.unfold(2, 4, 2).unfold(3, 4, 2)
    pixels = torch.einsum("pi,nchwij,qj->pqnhwc", b, tiles, b).flatten(0, 1)
    products = pixels.flatten(1, 3) @ filters.to(wide.dtype).transpose(1, 2)
    products = products.reshape(len(b), len(b), n, down, across, m)
    y = torch.einsum("ip,pqnhwm,jq->nhiwjm", a, products, a).reshape(n, 2 * down, 2 * across, m)
    y = y[:, :height, :width].permute(0, 3, 1, 2)
    if bias is not None:
        y = y + bias[:, None, None]
    return (y if skip is None else y + skip).to(x.dtype, memory_format=torch.channels_last)


def _is_doubled(filters: Tensor) -> bool:
    return filters.shape[0] == 9


def _shape(x: Tensor, filters: Tensor) -> tuple[int, int, int, int]:
    n, _, height, width = x.shape
    times = 2 if _is_doubled(filters) else 1
    return n, filters.shape[1], times * height, times * width


def _fake(x: Tensor, filters: Tensor, *_: Tensor | None) -> Tensor:
    n, m, height, width = _shape(x, filters)
    return x.new_empty((n, height, width, m)).permute(0, 3, 1, 2)


def _launch(x: Tensor, filters: Tensor, bias: Tensor | None, skip: Tensor | None) -> Tensor:
    found = kernels.of(x, filters, bias, skip)
    require(one_dtype(x, filters, bias, skip), "arguments of different types")
    require(x.ndim == 4 and filters.ndim == 3 and filters.shape[0] in (9, 16), "filters that were not transformed")
    require(filters.shape[2] == x.shape[1] and filters.is_contiguous(), "filters of other channels, or strided")
    y = _fake(x, filters)
    require(bias is None or (bias.shape == y.shape[1:2] and bias.is_contiguous()), "bias of another size")
    require(skip is None or skip.shape == y.shape, "skip of another shape")
    n, channels, height, width = x.shape
    x = x.permute(0, 2, 3, 1).contiguous()
    skip = skip if skip is None else skip.permute(0, 2, 3, 1).contiguous()
    if y.numel():
        addresses = (pointer(each) for each in (x, filters, bias, skip, y))
        sizes = (n, height, width, channels, filters.shape[1], int(_is_doubled(filters)))
        found.run("NhwcWinograd", Params(kernels.NUMBERS[x.dtype], *addresses, *sizes), x.device)
    return y


_OPERATOR = Operator(
    name="nhwc_winograd",
    schema="(Tensor x, Tensor filters, Tensor? bias, Tensor? skip) -> Tensor",
    plain=_plain,
    launch=_launch,
    fake=_fake,
    autocast="lower",
).define()


def nhwc_winograd(x: Tensor, filters: Tensor, bias: Tensor | None = None, skip: Tensor | None = None) -> Tensor:
    """The convolution of x (N, C, H, W), with padding 1, by the weight (M, C, 3, 3) of which `winograd_filters` made
    `filters` (16, M, C), + bias (M) + skip: skip and the result (N, M, H, W), which is channels last. With filters
    (9, M, C) every pixel of x is doubled first, and skip and the result are (N, M, 2 H, 2 W).

    Sums of four pixels are rounded to x's type: in float16 pixels must stay below 16000.
    """
    return _OPERATOR(x, filters, bias, skip)
