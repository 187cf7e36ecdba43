"""GEGLU with its MatMul: `sd_ort::linear_split_gelu`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from custom_ops.operators.linear_split_gelu.cases import Params
from sd_ort.torch.kernels import DTYPE_CODES, kernels_for
from sd_ort.torch.operators.linear_add import require_matmul
from sd_ort.torch.operators.registration import Operator, pointer, require, same_dtype

Tensor = torch.Tensor


def _fallback(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    left, right = F.linear(x, weight.t(), bias).chunk(2, dim=-1)
    return left * F.gelu(right)


def _launch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    kernels = kernels_for(x, weight, bias)
    require(same_dtype(x, weight, bias), "arguments of different dtypes")
    require_matmul(x, weight, bias)
    inner, columns = weight.shape
    require(columns % 2 == 0, "an odd number of columns")
    x = x.contiguous()
    half = columns // 2
    y = x.new_empty((*x.shape[:-1], half))
    if y.numel():
        addresses = (pointer(tensor) for tensor in (x, weight, bias, y))
        params = Params(DTYPE_CODES[x.dtype], *addresses, y.numel() // half, inner, half)
        kernels.run("LinearSplitGelu", params, x.device)
    return y


_OPERATOR = Operator(
    "linear_split_gelu", "(Tensor x, Tensor weight, Tensor bias) -> Tensor", _fallback, _launch,
    fake=lambda x, weight, _: x.new_empty((*x.shape[:-1], weight.shape[1] // 2)), autocast="lower",
).define()  # fmt: skip


def linear_split_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return left * gelu(right) of the halves of x @ weight + bias along the last axis, (..., C).

    Shapes: x (..., K), weight (K, 2 C), bias (2 C).
    """
    return _OPERATOR(x, weight, bias)
