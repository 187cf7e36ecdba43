"""A product that adds its bias and a residual where it writes: `sd_ort::linear_add`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from custom_ops.linear_add.cases import Params
from sd_ort.torch import kernels
from sd_ort.torch.operators.contract import Operator, one_dtype, pointer, require

Tensor = torch.Tensor


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None, skip: Tensor | None) -> Tensor:
    y = x @ weight
    if bias is not None:
        y = y + bias
    return y if skip is None else y + skip


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, skip: Tensor | None) -> Tensor:
    found = kernels.of(x, weight, bias, skip)
    require(one_dtype(x, weight, bias, skip), "arguments of different types")
    require_product(x, weight, bias)
    inner, columns = weight.shape
    shape = (*x.shape[:-1], columns)
    require(skip is None or skip.shape == shape, "skip of another shape")
    x = x.contiguous()
    skip = skip if skip is None else skip.contiguous()
    y = x.new_empty(shape)
    if y.numel():
        addresses = (pointer(each) for each in (x, weight, bias, skip, y))
        params = Params(kernels.NUMBERS[x.dtype], *addresses, y.numel() // columns, inner, columns)
        found.run("LinearAdd", params, x.device)
    return y


def require_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raises Refused where these are not x (..., K), weight (K, N) that lies so in memory, and bias (N) or none."""
    require(x.ndim >= 2 and weight.ndim == 2 and x.shape[-1] == weight.shape[0], "no product of rows and a matrix")
    require(weight.is_contiguous(), "the weight is not (inner, columns) in memory")
    require(bias is None or (bias.shape == weight.shape[1:] and bias.is_contiguous()), "bias of another size")


_OPERATOR = Operator(
    name="linear_add",
    schema="(Tensor x, Tensor weight, Tensor? bias, Tensor? skip) -> Tensor",
    plain=_plain,
    launch=_launch,
    fake=lambda x, weight, *_: x.new_empty((*x.shape[:-1], weight.shape[1])),
    autocast="lower",
).define()


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None = None, skip: Tensor | None = None) -> Tensor:
    """x @ weight + bias + skip: x (..., K), weight (K, N), bias (N), skip and the result (..., N)."""
    return _OPERATOR(x, weight, bias, skip)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., K) times a layer's weight (N, K), transposed, + bias (N). A GPU's weight that lies by columns is read by
    `linear_add`, which measures the algorithms of cuBLASLt where torch takes the first that it proposes; not for
    gradients, for which an operator computes its product again.
    """
    return linear_add(x, weight.t(), bias) if is_read_by_columns(weight) else F.linear(x, weight, bias)


def is_read_by_columns(weight: Tensor) -> bool:
    """Whether a layer's weight is one for our tuned products."""
    by_columns = weight.ndim == 2 and not weight.is_contiguous() and weight.t().is_contiguous()
    return by_columns and weight.is_cuda and not torch.is_grad_enabled()
