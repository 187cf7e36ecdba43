"""MatMul with a fused bias and residual: `sd_ort::linear_add`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from custom_ops.operators.linear_add.cases import Params
from sd_ort.torch.kernels import DTYPE_CODES, kernels_for
from sd_ort.torch.operators.registration import Operator, pointer, require, same_dtype

Tensor = torch.Tensor


def _fallback(x: Tensor, weight: Tensor, bias: Tensor | None, skip: Tensor | None) -> Tensor:
    y = x @ weight
    if bias is not None:
        y = y + bias
    return y if skip is None else y + skip


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, skip: Tensor | None) -> Tensor:
    kernels = kernels_for(x, weight, bias, skip)
    require(same_dtype(x, weight, bias, skip), "arguments of different dtypes")
    require_matmul(x, weight, bias)
    inner, columns = weight.shape
    shape = (*x.shape[:-1], columns)
    require(skip is None or skip.shape == shape, "skip of another shape")
    x = x.contiguous()
    skip = skip if skip is None else skip.contiguous()
    y = x.new_empty(shape)
    if y.numel():
        addresses = (pointer(tensor) for tensor in (x, weight, bias, skip, y))
        params = Params(DTYPE_CODES[x.dtype], *addresses, y.numel() // columns, inner, columns)
        kernels.run("LinearAdd", params, x.device)
    return y


def require_matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise UnsupportedCall unless the shapes are x (..., K), contiguous weight (K, N), and bias (N) or None."""
    require(
        x.ndim >= 2 and weight.ndim == 2 and x.shape[-1] == weight.shape[0], "x and weight are not (..., K) and (K, N)"
    )
    require(weight.is_contiguous(), "the weight is not contiguous as (K, N)")
    require(bias is None or (bias.shape == weight.shape[1:] and bias.is_contiguous()), "bias of another size")


_OPERATOR = Operator(
    "linear_add", "(Tensor x, Tensor weight, Tensor? bias, Tensor? skip) -> Tensor", _fallback, _launch,
    fake=lambda x, weight, *_: x.new_empty((*x.shape[:-1], weight.shape[1])), autocast="lower",
).define()  # fmt: skip


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None = None, skip: Tensor | None = None) -> Tensor:
    """Return x @ weight + bias + skip; x (..., K), weight (K, N), bias (N), skip and the result (..., N)."""
    return _OPERATOR(x, weight, bias, skip)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x (..., K) times the transposed weight (N, K) of a Linear layer, + bias (N).

    A column-major weight on a GPU is multiplied by `linear_add`, which measures the algorithms of cuBLASLt; torch takes
    the first one that cuBLASLt proposes.
    """
    return linear_add(x, weight.t(), bias) if can_use_linear_add(weight) else F.linear(x, weight, bias)


def can_use_linear_add(weight: Tensor) -> bool:
    """Return whether a Linear layer's weight is column-major on a GPU, and gradients are off.

    With gradients, the backward of `linear_add` would compute the MatMul again.
    """
    column_major = weight.ndim == 2 and not weight.is_contiguous() and weight.t().is_contiguous()
    return column_major and weight.is_cuda and not torch.is_grad_enabled()
