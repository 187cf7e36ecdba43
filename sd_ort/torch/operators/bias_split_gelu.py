"""GEGLU behind its product: `sd_ort::bias_split_gelu`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from custom_ops.bias_split_gelu.cases import Params
from sd_ort.torch import kernels
from sd_ort.torch.operators.contract import Operator, one_dtype, pointer, require

Tensor = torch.Tensor


def _plain(x: Tensor, bias: Tensor) -> Tensor:
    left, right = (x + bias).chunk(2, dim=-1)
    return left * F.gelu(right)


def _launch(x: Tensor, bias: Tensor) -> Tensor:
    found = kernels.of(x, bias)
    require(one_dtype(x, bias), "x and bias of different types")
    require(x.shape[-1] % 2 == 0, "an odd number of columns")
    require(bias.shape == x.shape[-1:] and bias.is_contiguous(), "bias of another size")
    x = x.contiguous()
    half = x.shape[-1] // 2
    y = x.new_empty((*x.shape[:-1], half))
    if y.numel():
        params = Params(kernels.NUMBERS[x.dtype], pointer(x), pointer(bias), pointer(y), y.numel() // half, half)
        found.run("BiasSplitGelu", params, x.device)
    return y


_OPERATOR = Operator(
    name="bias_split_gelu",
    schema="(Tensor x, Tensor bias) -> Tensor",
    plain=_plain,
    launch=_launch,
    fake=lambda x, _: x.new_empty((*x.shape[:-1], x.shape[-1] // 2)),
    autocast="lower",
).define()


def bias_split_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """x + bias in halves along the last axis, left * gelu(right): x (..., 2 C), bias (2 C), result (..., C)."""
    return _OPERATOR(x, bias)
