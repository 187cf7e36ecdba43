"""The bias of a MatMul or convolution and an optional residual, added in one pass: `sd_ort::bias_add`."""

from __future__ import annotations

import torch

from custom_ops.operators.bias_add.cases import Params
from sd_ort.torch.kernels import DTYPE_CODES, kernels_for
from sd_ort.torch.operators.registration import Operator, pointer, require, same_dtype

Tensor = torch.Tensor


def _fallback(x: Tensor, bias: Tensor, skip: Tensor | None) -> Tensor:
    return x + bias if skip is None else x + bias + skip


def _launch(x: Tensor, bias: Tensor, skip: Tensor | None) -> Tensor:
    kernels = kernels_for(x, bias, skip)
    require(same_dtype(x, bias, skip), "arguments of different dtypes")
    require(skip is None or skip.shape == x.shape, "skip of another shape")
    require(bias.shape == x.shape[-1:] and bias.is_contiguous(), "bias of another size")
    x, skip = x.contiguous(), skip if skip is None else skip.contiguous()
    y = torch.empty_like(x)
    if y.numel():
        channels = x.shape[-1]
        rows = y.numel() // channels
        addresses = (pointer(tensor) for tensor in (x, bias, skip, y))
        kernels.run("BiasAdd", Params(DTYPE_CODES[x.dtype], *addresses, rows, channels), x.device)
    return y


_OPERATOR = Operator(
    "bias_add", "(Tensor x, Tensor bias, Tensor? skip) -> Tensor", _fallback, _launch,
    fake=lambda x, *_: x.new_empty(x.shape), autocast="widest",
).define()  # fmt: skip


def bias_add(x: Tensor, bias: Tensor, skip: Tensor | None = None) -> Tensor:
    """Return x + bias + skip; x and skip (..., C), bias (C)."""
    return _OPERATOR(x, bias, skip)
