"""GEGLU after its MatMul: `sd_ort::bias_split_gelu`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from custom_ops.operators.bias_split_gelu.cases import Params
from sd_ort.torch.kernels import DTYPE_CODES, kernels_for
from sd_ort.torch.operators.registration import Operator, pointer, require, same_dtype

Tensor = torch.Tensor


def _fallback(x: Tensor, bias: Tensor) -> Tensor:
    left, right = (x + bias).chunk(2, dim=-1)
    return left * F.gelu(right)


def _launch(x: Tensor, bias: Tensor) -> Tensor:
    kernels = kernels_for(x, bias)
    require(same_dtype(x, bias), "x and bias of different dtypes")
    require(x.shape[-1] % 2 == 0, "an odd number of columns")
    require(bias.shape == x.shape[-1:] and bias.is_contiguous(), "bias of another size")
    x = x.contiguous()
    half = x.shape[-1] // 2
    y = x.new_empty((*x.shape[:-1], half))
    if y.numel():
        params = Params(DTYPE_CODES[x.dtype], pointer(x), pointer(bias), pointer(y), y.numel() // half, half)
        kernels.run("BiasSplitGelu", params, x.device)
    return y


_OPERATOR = Operator(
    "bias_split_gelu", "(Tensor x, Tensor bias) -> Tensor", _fallback, _launch,
    fake=lambda x, _: x.new_empty((*x.shape[:-1], x.shape[-1] // 2)), autocast="lower",
).define()  # fmt: skip


def bias_split_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """Return left * gelu(right) of the halves of x + bias along the last axis; x (..., 2 C), bias (2 C)."""
    return _OPERATOR(x, bias)
