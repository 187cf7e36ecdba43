"""A GEGLU layer whole, its product included: `sd_ort::linear_split_gelu`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from custom_ops.linear_split_gelu.cases import Params
from sd_ort.torch import kernels
from sd_ort.torch.operators.contract import Operator, one_dtype, pointer, require
from sd_ort.torch.operators.linear_add import require_product

Tensor = torch.Tensor


def _plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    left, right = F.linear(x, weight.t(), bias).chunk(2, dim=-1)
    return left * F.gelu(right)


def _launch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    found = kernels.of(x, weight, bias)
    require(one_dtype(x, weight, bias), "arguments of different types")
    require_product(x, weight, bias)
    inner, columns = weight.shape
    require(columns % 2 == 0, "an odd number of columns")
    x = x.contiguous()
    half = columns // 2
    y = x.new_empty((*x.shape[:-1], half))
    if y.numel():
        addresses = (pointer(each) for each in (x, weight, bias, y))
        params = Params(kernels.NUMBERS[x.dtype], *addresses, y.numel() // half, inner, half)
        found.run("LinearSplitGelu", params, x.device)
    return y


_OPERATOR = Operator(
    name="linear_split_gelu",
    schema="(Tensor x, Tensor weight, Tensor bias) -> Tensor",
    plain=_plain,
    launch=_launch,
    fake=lambda x, weight, _: x.new_empty((*x.shape[:-1], weight.shape[1] // 2)),
    autocast="lower",
).define()


def linear_split_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x @ weight + bias in halves along the last axis, left * gelu(right): x (..., K), weight (K, 2 C), bias (2 C),
    result (..., C).
    """
    return _OPERATOR(x, weight, bias)
