"""LayerNorm of a residual sum: `sd_ort::skip_layer_norm`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from custom_ops.operators.skip_layer_norm.cases import Params
from sd_ort.torch.kernels import DTYPE_CODES, kernels_for
from sd_ort.torch.operators.registration import Operator, pointer, require, same_dtype

Tensor = torch.Tensor


def _fallback(
    x: Tensor, skip: Tensor, bias: Tensor | None, gamma: Tensor, beta: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    total = x + skip if bias is None else x + bias + skip
    return F.layer_norm(total, x.shape[-1:], gamma, beta, epsilon), total


def _launch(
    x: Tensor, skip: Tensor, bias: Tensor | None, gamma: Tensor, beta: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    kernels = kernels_for(x, skip, bias, gamma, beta)
    channels = x.shape[-1]
    require(same_dtype(x, skip, bias, gamma, beta), "arguments of different dtypes")
    require(channels > 0 and skip.shape in (x.shape, (channels,)), "skip of another shape, or no channels")
    weights = [weight for weight in (bias, gamma, beta) if weight is not None]
    require(
        all(weight.shape == (channels,) and weight.is_contiguous() for weight in weights), "weights of another size"
    )
    x, skip = x.contiguous(), skip.contiguous()
    y, total = torch.empty_like(x), torch.empty_like(x)
    rows = x.numel() // channels
    params = Params(
        dtype=DTYPE_CODES[x.dtype],
        x=pointer(x),
        skip=pointer(skip),
        gamma=pointer(gamma),
        beta=pointer(beta),
        bias=pointer(bias),
        y=pointer(y),
        sum=pointer(total),
        rows=rows,
        skip_rows=rows if skip.shape == x.shape else 1,
        channels=channels,
        epsilon=epsilon,
    )
    if rows:
        kernels.run("SkipLayerNormalization", params, x.device)
    return y, total


_OPERATOR = Operator(
    "skip_layer_norm",
    "(Tensor x, Tensor skip, Tensor? bias, Tensor gamma, Tensor? beta, float epsilon) -> (Tensor, Tensor)",
    _fallback, _launch, fake=lambda x, *_: (x.new_empty(x.shape), x.new_empty(x.shape)), autocast="float32",
).define()  # fmt: skip


def skip_layer_norm(
    x: Tensor, skip: Tensor, bias: Tensor | None, gamma: Tensor, beta: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Return LayerNorm of x + bias + skip over the last axis, and the sum; x (..., C), skip as x or (C), others (C)."""
    return _OPERATOR(x, skip, bias, gamma, beta, epsilon)
