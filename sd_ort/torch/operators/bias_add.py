"""A product's or convolution's bias, and a residual if there is one, in one pass: `sd_ort::bias_add`."""

from __future__ import annotations

import torch

from custom_ops.bias_add.cases import Params
from sd_ort.torch import kernels
from sd_ort.torch.operators.contract import Operator, one_dtype, pointer, require

Tensor = torch.Tensor


def _plain(x: Tensor, bias: Tensor, skip: Tensor | None) -> Tensor:
    return x + bias if skip is None else x + bias + skip


def _launch(x: Tensor, bias: Tensor, skip: Tensor | None) -> Tensor:
    found = kernels.of(x, bias, skip)
    require(one_dtype(x, bias, skip), "arguments of different types")
    require(skip is None or skip.shape == x.shape, "skip of another shape")
    require(bias.shape == x.shape[-1:] and bias.is_contiguous(), "bias of another size")
    x, skip = x.contiguous(), skip if skip is None else skip.contiguous()
    y = torch.empty_like(x)
    if y.numel():
        channels = x.shape[-1]
        rows = y.numel() // channels
        addresses = (pointer(each) for each in (x, bias, skip, y))
        found.run("BiasAdd", Params(kernels.NUMBERS[x.dtype], *addresses, rows, channels), x.device)
    return y


_OPERATOR = Operator(
    name="bias_add",
    schema="(Tensor x, Tensor bias, Tensor? skip) -> Tensor",
    plain=_plain,
    launch=_launch,
    fake=lambda x, *_: x.new_empty(x.shape),
    autocast="widest",
).define()


def bias_add(x: Tensor, bias: Tensor, skip: Tensor | None = None) -> Tensor:
    """x + bias + skip: x and skip (..., C), bias (C)."""
    return _OPERATOR(x, bias, skip)
