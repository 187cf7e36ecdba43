"""Convolutions of 3 x 3 with 4/9 of the multiplications (nhwc_winograd), by filters that are kept (lasting.py).

For those behind GroupNorm and SiLU, and a U-Net's upsampling: their pixels are small, so that sums of four of them stay
in float16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sd_ort.torch import kernels, watchers
from sd_ort.torch.lasting import Kept
from sd_ort.torch.modules import parts
from sd_ort.torch.operators import nhwc_winograd, winograd_filters
from sd_ort.torch.operators.group_norm import is_channels_last

Tensor = torch.Tensor

FILTERS = "_sd_ort_filters"  # a layer's attribute: its transformed filters
FEWEST_PIXELS = 512  # of a batch of results
LEAST_SAVED = 210  # C channels and M filters: products save as C * M, and transforms cost as C + M


def prepare(layer: nn.Module, doubled: bool = False) -> None:
    """Lets a layer be convolved so; `doubled` one of images whose pixels are doubled before, with 9 products instead of
    16 for four times the pixels. Its filters are transformed when a call first wants them.
    """
    if isinstance(layer, nn.Conv2d):
        layer.__dict__[FILTERS] = Kept(_filters_of_doubled if doubled else winograd_filters)


def _filters_of_doubled(weight: Tensor) -> Tensor:
    return winograd_filters(weight, True)


def release(layer: nn.Module) -> None:
    """The reverse; their memory is free."""
    layer.__dict__.pop(FILTERS, None)


class KeepsFilters:
    """Of a module with such layers: weights that are moved away, as offloading does, leave no filters behind."""

    def _apply(self: Any, *arguments: Any, **keywords: Any) -> Any:
        moved = super()._apply(*arguments, **keywords)  # type: ignore[misc]
        for layer in self.modules():
            if FILTERS in layer.__dict__:
                layer.__dict__[FILTERS].leave(layer.weight)
        return moved


def conv(layer: nn.Module, x: Tensor, skip: Tensor | None = None, doubled: bool = False) -> Tensor | None:
    """`layer` of x (N, C, H, W), + skip (N, M, H, W) if there is one; None where the layer is to run itself. `doubled`:
    as it was prepared.
    """
    if torch.compiler.is_compiling() or FILTERS not in layer.__dict__:
        return None
    kept: Kept = layer.__dict__[FILTERS]
    if torch.is_grad_enabled():
        kept.forget()  # fused optimizers write weights, and count it nowhere
        return None
    if not takes(layer, x, doubled):
        return None
    filters = kept.read(layer.weight)  # type: ignore[arg-type]
    return None if filters is None else nhwc_winograd(x, filters, layer.bias, skip)  # type: ignore[arg-type]


def takes(layer: nn.Module, x: Tensor, doubled: bool) -> bool:
    """Whether `conv` is to run a prepared layer: 3 x 3 filters that move by one, nothing that traces or casts."""
    if not parts.is_three_by_three(layer) or watchers.autocast() or watchers.transformed():
        return False
    return is_channels_last(x) and pays(x, layer.weight, doubled)  # type: ignore[arg-type]


def pays(x: Tensor, weight: Tensor, doubled: bool) -> bool:
    """Whether it is faster for x (N, C, H, W) and a weight (M, C, 3, 3): by the rule of nhwc_conv/op.h, which says what
    was measured.
    """
    if x.device.type != "cuda" or not x.dtype == weight.dtype == torch.float16 or not _has_kernels(x.device):
        return False
    filters, channels = weight.shape[:2]
    pixels = x.shape[0] * x.shape[2] * x.shape[3] * (4 if doubled else 1)
    return pixels >= FEWEST_PIXELS and channels * filters >= LEAST_SAVED * (channels + filters)


def _has_kernels(device: torch.device) -> bool:
    """Whether the library is there, may take scratch memory, and is faster than torch's on this GPU."""
    try:
        found = kernels.gpu_kernels()
    except kernels.Refused:
        return False
    assert isinstance(found, kernels.GpuKernels)
    return not found.without_workspace and kernels.is_hopper_or_newer(device)
