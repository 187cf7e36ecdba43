"""GroupNorm with SiLU behind it and a sum before it: `sd_ort::group_norm` and `sd_ort::skip_group_norm`."""

from __future__ import annotations

import ctypes
from math import prod

import torch
import torch.nn.functional as F

from custom_ops.group_norm.cases import Params
from sd_ort.torch import kernels
from sd_ort.torch.operators.contract import Operator, one_dtype, pointer, require

Tensor = torch.Tensor


def is_channels_last(x: Tensor) -> bool:
    """Whether x (N, C, ...) lies in memory as (N, ..., C)."""
    if x.is_contiguous():
        return False
    if x.ndim == 4:
        return x.is_contiguous(memory_format=torch.channels_last)
    return x.movedim(1, -1).is_contiguous()


def like(x: Tensor) -> Tensor:
    """An empty tensor of x's shape (N, C, ...): channels last where x is, else contiguous."""
    return _empty(x, is_channels_last(x))


def _empty(x: Tensor, last: bool) -> Tensor:
    if not last:
        return x.new_empty(x.shape)
    if x.ndim == 4:
        return torch.empty_like(x, memory_format=torch.channels_last)
    return x.new_empty((x.shape[0], *x.shape[2:], x.shape[1])).movedim(-1, 1)


def _plain(x: Tensor, gamma: Tensor, beta: Tensor, groups: int, epsilon: float, silu: bool) -> Tensor:
    y = F.group_norm(x, groups, gamma.to(x.dtype), beta.to(x.dtype), epsilon)
    return F.silu(y) if silu else y


def _plain_skip(
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
    y = _plain(total, gamma, beta, groups, epsilon, silu)
    return y, total if with_sum else total.flatten()[:0].clone()


def _params(
    x: Tensor, last: bool, gamma: Tensor, beta: Tensor, y: Tensor, groups: int, epsilon: float, silu: bool
) -> Params:
    require(x.ndim >= 3, "x has no spatial axis")
    require(groups > 0 and x.shape[1] % groups == 0, "groups do not divide the channels")
    require(gamma.dtype == beta.dtype and gamma.dtype in (torch.float32, x.dtype), "gamma and beta of another type")
    require(gamma.shape == beta.shape == x.shape[1:2], "gamma or beta of another size")
    require(gamma.is_contiguous() and beta.is_contiguous(), "gamma or beta is strided")
    return Params(
        dtype=kernels.NUMBERS[x.dtype],
        affine_dtype=kernels.NUMBERS[gamma.dtype],
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
    found = kernels.of(x, gamma, beta)
    last = is_channels_last(x)
    x = x if last else x.contiguous()
    y = _empty(x, last)
    params = _params(x, last, gamma, beta, y, groups, epsilon, silu)
    _run(found, "GroupNorm", params, x)
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
    found = kernels.of(x, skip, bias, gamma, beta)
    require(one_dtype(x, skip, bias), "x, skip and bias of different types")
    require(skip.shape in (x.shape, x.shape[:2]), "skip is neither as x nor a number a sample and channel")
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
    _run(found, "SkipGroupNorm", params, x)
    return y, total


def _run(found: kernels.Kernels, name: str, params: ctypes.Structure, x: Tensor) -> None:
    if x.numel():
        found.run(name, params, x.device)


_GROUP_NORM = Operator(
    name="group_norm",
    schema="(Tensor x, Tensor gamma, Tensor beta, int groups, float epsilon, bool silu) -> Tensor",
    plain=_plain,
    launch=_launch,
    fake=lambda x, *_: like(x),
    autocast="float32",
).define()

_SKIP_GROUP_NORM = Operator(
    name="skip_group_norm",
    schema=(
        "(Tensor x, Tensor skip, Tensor? bias, Tensor gamma, Tensor beta, int groups, float epsilon, bool silu,"
        " bool with_sum) -> (Tensor, Tensor)"
    ),
    plain=_plain_skip,
    launch=_launch_skip,
    fake=lambda x, *others: (like(x), like(x) if others[-1] else x.new_empty(0)),
    autocast="float32",
).define()


def group_norm(x: Tensor, gamma: Tensor, beta: Tensor, groups: int, epsilon: float, silu: bool = False) -> Tensor:
    """Normalizes x (N, C, ...) over groups of channels, with weights gamma and beta (C), SiLU behind it if asked.

    Channels-last x gives channels-last results, without a copy; other strides are made contiguous first.
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
    """The same of x + skip + bias, and that sum: skip as x or (N, C), bias (C). The sum is empty unless asked for."""
    return _SKIP_GROUP_NORM(x, skip, bias, gamma, beta, groups, epsilon, silu, with_sum)
