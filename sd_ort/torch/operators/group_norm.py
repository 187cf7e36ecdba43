"""GroupNorm with a fused SiLU and a fused sum: `sd_ort::group_norm` and `sd_ort::skip_group_norm`."""

from __future__ import annotations

import ctypes
from math import prod

import torch
import torch.nn.functional as F

from custom_ops.operators.group_norm.cases import Params
from sd_ort.torch.kernels import DTYPE_CODES, Kernels, kernels_for
from sd_ort.torch.operators.registration import Operator, pointer, require, same_dtype

Tensor = torch.Tensor


def is_channels_last(x: Tensor) -> bool:
    """Return whether x (N, C, ...) is stored as (N, ..., C)."""
    if x.is_contiguous():
        return False
    if x.ndim == 4:
        return x.is_contiguous(memory_format=torch.channels_last)
    return x.movedim(1, -1).is_contiguous()


def empty_like(x: Tensor) -> Tensor:
    """Return an empty tensor of x's shape (N, C, ...), channels last if x is, else contiguous."""
    return _empty(x, is_channels_last(x))


def _empty(x: Tensor, last: bool) -> Tensor:
    if not last:
        return x.new_empty(x.shape)
    if x.ndim == 4:
        return torch.empty_like(x, memory_format=torch.channels_last)
    return x.new_empty((x.shape[0], *x.shape[2:], x.shape[1])).movedim(-1, 1)


def _fallback(x: Tensor, gamma: Tensor, beta: Tensor, groups: int, epsilon: float, silu: bool) -> Tensor:
    y = F.group_norm(x, groups, gamma.to(x.dtype), beta.to(x.dtype), epsilon)
    return F.silu(y) if silu else y


def _fallback_skip(
    x: Tensor,
    skip: Tensor,
    bias: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    groups: int,
    epsilon: float,
    silu: bool,
    with_sum: bool,
) -> tuple[Tensor, Tensor]:
    total = x + (skip if skip.ndim == x.ndim else skip.reshape(*skip.shape, *(1 for _ in x.shape[2:])))
    if bias is not None:
        total = total + bias.reshape(1, -1, *(1 for _ in x.shape[2:]))
    y = _fallback(total, gamma, beta, groups, epsilon, silu)
    return y, total if with_sum else total.flatten()[:0].clone()


def _params(
    x: Tensor, last: bool, gamma: Tensor, beta: Tensor, y: Tensor, groups: int, epsilon: float, silu: bool
) -> Params:
    require(x.ndim >= 3, "x has no spatial axis")
    require(groups > 0 and x.shape[1] % groups == 0, "groups do not divide the channels")
    require(gamma.dtype == beta.dtype and gamma.dtype in (torch.float32, x.dtype), "gamma and beta of another dtype")
    require(gamma.shape == beta.shape == x.shape[1:2], "gamma or beta of another size")
    require(gamma.is_contiguous() and beta.is_contiguous(), "gamma or beta is strided")
    return Params(
        dtype=DTYPE_CODES[x.dtype],
        affine_dtype=DTYPE_CODES[gamma.dtype],
        x=pointer(x),
        gamma=pointer(gamma),
        beta=pointer(beta),
        y=pointer(y),
        batch=x.shape[0],
        spatial=prod(x.shape[2:]),
        channels=x.shape[1],
        groups=groups,
        activation=int(silu),
        channels_last=int(last),
        epsilon=epsilon,
    )


def _launch(x: Tensor, gamma: Tensor, beta: Tensor, groups: int, epsilon: float, silu: bool) -> Tensor:
    kernels = kernels_for(x, gamma, beta)
    last = is_channels_last(x)
    x = x if last else x.contiguous()
    y = _empty(x, last)
    params = _params(x, last, gamma, beta, y, groups, epsilon, silu)
    _run(kernels, "GroupNorm", params, x)
    return y


def _launch_skip(
    x: Tensor,
    skip: Tensor,
    bias: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    groups: int,
    epsilon: float,
    silu: bool,
    with_sum: bool,
) -> tuple[Tensor, Tensor]:
    kernels = kernels_for(x, skip, bias, gamma, beta)
    require(same_dtype(x, skip, bias), "x, skip and bias of different dtypes")
    require(skip.shape in (x.shape, x.shape[:2]), "skip has neither the shape of x nor (N, C)")
    last = is_channels_last(x)
    x = x if last else x.contiguous()
    y, total = _empty(x, last), _empty(x, last) if with_sum else x.new_empty(0)
    if skip.shape != x.shape:
        skip = skip.contiguous()
    elif skip.stride() != x.stride():
        skip = _empty(x, last).copy_(skip)
    params = _params(x, last, gamma, beta, y, groups, epsilon, silu)
    params.skip, params.bias = pointer(skip), pointer(bias)
    params.sum = pointer(total) if with_sum else None
    params.skip_broadcast = int(skip.shape != x.shape)
    require(bias is None or (bias.shape == x.shape[1:2] and bias.is_contiguous()), "bias of another size")
    _run(kernels, "SkipGroupNorm", params, x)
    return y, total


def _run(kernels: Kernels, name: str, params: ctypes.Structure, x: Tensor) -> None:
    if x.numel():
        kernels.run(name, params, x.device)


_GROUP_NORM = Operator(
    "group_norm", "(Tensor x, Tensor gamma, Tensor beta, int groups, float epsilon, bool silu) -> Tensor",
    _fallback, _launch, fake=lambda x, *_: empty_like(x), autocast="float32",
).define()  # fmt: skip

_SKIP_GROUP_NORM = Operator(
    "skip_group_norm",
    "(Tensor x, Tensor skip, Tensor? bias, Tensor gamma, Tensor beta, int groups, float epsilon, bool silu,"
    " bool with_sum) -> (Tensor, Tensor)", _fallback_skip, _launch_skip,
    fake=lambda x, *others: (empty_like(x), empty_like(x) if others[-1] else x.new_empty(0)), autocast="float32",
).define()  # fmt: skip


def group_norm(x: Tensor, gamma: Tensor, beta: Tensor, groups: int, epsilon: float, silu: bool = False) -> Tensor:
    """Return GroupNorm of x (N, C, ...) with gamma and beta (C), followed by SiLU if `silu`.

    Channels-last x gives a channels-last result without a copy; x of other strides is made contiguous first.
    """
    return _GROUP_NORM(x, gamma, beta, groups, epsilon, silu)


def skip_group_norm(
    x: Tensor,
    skip: Tensor,
    bias: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    groups: int,
    epsilon: float,
    silu: bool = False,
    with_sum: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return `group_norm` of x + skip + bias, and that sum; skip as x or (N, C), bias (C).

    The sum is an empty tensor unless `with_sum`.
    """
    return _SKIP_GROUP_NORM(x, skip, bias, gamma, beta, groups, epsilon, silu, with_sum)
