"""3x3 convolution by Winograd's F(2 x 2, 3 x 3), with 4/9 of the multiplications: `sd_ort::nhwc_winograd`.

Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", arXiv 1509.09308.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from custom_ops.operators.nhwc_winograd.cases import Params
from sd_ort.torch.kernels import DTYPE_CODES, kernels_for
from sd_ort.torch.operators.registration import Operator, pointer, require, same_dtype
from sd_ort.torch.operators.winograd_filters import UPSAMPLED_ROWS

Tensor = torch.Tensor

# Transform of a tile of 4 x 4 input pixels, and of its products to 2 x 2 output pixels.
_B = ((1.0, 0.0, -1.0, 0.0), (0.0, 1.0, 1.0, 0.0), (0.0, -1.0, 1.0, 0.0), (0.0, 1.0, 0.0, -1.0))
_A = ((1.0, 1.0, 1.0, 0.0), (0.0, 1.0, -1.0, -1.0))


def _fallback(x: Tensor, filters: Tensor, bias: Tensor | None, skip: Tensor | None) -> Tensor:
    upsample_2x, (n, m, height, width) = _is_upsampled(filters), _output_shape(x, filters)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    rows = list(UPSAMPLED_ROWS) if upsample_2x else slice(None)
    b, a = wide.new_tensor(_B)[rows], wide.new_tensor(_A)[:, rows]
    if upsample_2x:
        wide = wide.repeat_interleave(2, 2).repeat_interleave(2, 3)
    down, across = height // 2 + 1, width // 2 + 1  # tiles, two pixels apart; enough for any size
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


def _is_upsampled(filters: Tensor) -> bool:
    return filters.shape[0] == 9


def _output_shape(x: Tensor, filters: Tensor) -> tuple[int, int, int, int]:
    n, _, height, width = x.shape
    factor = 2 if _is_upsampled(filters) else 1
    return n, filters.shape[1], factor * height, factor * width


def _fake(x: Tensor, filters: Tensor, *_: Tensor | None) -> Tensor:
    n, m, height, width = _output_shape(x, filters)
    return x.new_empty((n, height, width, m)).permute(0, 3, 1, 2)


def _launch(x: Tensor, filters: Tensor, bias: Tensor | None, skip: Tensor | None) -> Tensor:
    kernels = kernels_for(x, filters, bias, skip)
    require(same_dtype(x, filters, bias, skip), "arguments of different dtypes")
    require(x.ndim == 4 and filters.ndim == 3 and filters.shape[0] in (9, 16), "filters that are not transformed")
    require(filters.shape[2] == x.shape[1] and filters.is_contiguous(), "filters of other channels, or strided")
    y = _fake(x, filters)
    require(bias is None or (bias.shape == y.shape[1:2] and bias.is_contiguous()), "bias of another size")
    require(skip is None or skip.shape == y.shape, "skip of another shape")
    n, channels, height, width = x.shape
    x = x.permute(0, 2, 3, 1).contiguous()
    skip = skip if skip is None else skip.permute(0, 2, 3, 1).contiguous()
    if y.numel():
        addresses = (pointer(tensor) for tensor in (x, filters, bias, skip, y))
        sizes = (n, height, width, channels, filters.shape[1], int(_is_upsampled(filters)))
        kernels.run("NhwcWinograd", Params(DTYPE_CODES[x.dtype], *addresses, *sizes), x.device)
    return y


_OPERATOR = Operator(
    "nhwc_winograd", "(Tensor x, Tensor filters, Tensor? bias, Tensor? skip) -> Tensor", _fallback, _launch,
    fake=_fake, autocast="lower",
).define()  # fmt: skip


def nhwc_winograd(x: Tensor, filters: Tensor, bias: Tensor | None = None, skip: Tensor | None = None) -> Tensor:
    """Return the convolution of x (N, C, H, W) with padding 1, + bias (M) + skip, (N, M, H, W) and channels last.

    filters: `winograd_filters` of the weight (M, C, 3, 3). With (16, M, C), skip is (N, M, H, W). With (9, M, C), x is
    upsampled 2x (nearest) first, and skip and the result are (N, M, 2 H, 2 W).

    Sums of four input values are rounded to x's dtype: in float16, input values must stay below 16000.
    """
    return _OPERATOR(x, filters, bias, skip)
