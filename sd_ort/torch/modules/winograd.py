"""3x3 convolutions by Winograd's algorithm (nhwc_winograd), 4/9 of the multiplications, with cached filters.

Only for convolutions after GroupNorm and SiLU, and after the upsampling of a UNet: their input values are small, so
that sums of four stay in the range of float16. The transformed filters are derived tensors (derived_tensors.py).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from sd_ort.torch import dispatch_state, kernels
from sd_ort.torch.derived_tensors import DerivedTensor
from sd_ort.torch.modules import layer_ops
from sd_ort.torch.operators import nhwc_winograd, winograd_filters
from sd_ort.torch.operators.group_norm import is_channels_last

Tensor = torch.Tensor

FILTERS = "_sd_ort_filters"  # attribute of a layer: the DerivedTensor of its transformed filters
MIN_PIXELS = 512  # of the output of a batch
MIN_SAVING = 210  # C * M / (C + M): the GEMMs save as C * M, and the transforms cost as C + M


def prepare(layer: nn.Module, upsample_2x: bool = False) -> None:
    """Let `conv` run a layer by Winograd's algorithm. The first call that needs the filters transforms them.

    upsample_2x: the input is upsampled 2x (nearest) before the convolution: 9 GEMMs instead of 16, for four times the
    pixels.
    """
    if isinstance(layer, nn.Conv2d):
        layer.__dict__[FILTERS] = DerivedTensor(
            partial(winograd_filters, upsample_2x=True) if upsample_2x else winograd_filters
        )


def release(layer: nn.Module) -> None:
    """Undo `prepare` and free the filters."""
    layer.__dict__.pop(FILTERS, None)


class WinogradFilterMixin:
    """Mixin of modules with prepared layers: frees cached filters when weights move, as offloading does."""

    def _apply(self: Any, *arguments: Any, **keywords: Any) -> Any:
        result = super()._apply(*arguments, **keywords)  # type: ignore[misc]
        for layer in self.modules():
            if FILTERS in layer.__dict__:
                layer.__dict__[FILTERS].release_if_moved(layer.weight)
        return result


def conv(layer: nn.Module, x: Tensor, skip: Tensor | None = None, upsample_2x: bool = False) -> Tensor | None:
    """Return `layer` of x (N, C, H, W), + skip (N, M, H, W), or None if the caller must run the layer itself.

    upsample_2x: as in `prepare`; skip and the result are (N, M, 2 H, 2 W) then.
    """
    if torch.compiler.is_compiling() or FILTERS not in layer.__dict__:
        return None
    derived: DerivedTensor = layer.__dict__[FILTERS]
    if torch.is_grad_enabled():
        derived.invalidate()  # fused optimizers write weights without counting
        return None
    if not is_supported(layer, x, upsample_2x):
        return None
    filters = derived.read(layer.weight)  # type: ignore[arg-type]
    return None if filters is None else nhwc_winograd(x, filters, layer.bias, skip)  # type: ignore[arg-type]


def is_supported(layer: nn.Module, x: Tensor, upsample_2x: bool) -> bool:
    """Return whether `conv` runs a prepared layer: an unmodified 3x3 one of stride 1, with no tracing or autocast."""
    if not layer_ops.is_conv3x3(layer) or dispatch_state.is_autocast() or dispatch_state.is_intercepted():
        return False
    return is_channels_last(x) and is_faster(x, layer.weight, upsample_2x)  # type: ignore[arg-type]


def is_faster(x: Tensor, weight: Tensor, upsample_2x: bool) -> bool:
    """Return whether Winograd is faster for x (N, C, H, W) and a weight (M, C, 3, 3).

    The rule and the measurements behind it are those of nhwc_conv/op.h.
    """
    if x.device.type != "cuda" or not x.dtype == weight.dtype == torch.float16 or not _has_kernels(x.device):
        return False
    filters, channels = weight.shape[:2]
    pixels = x.shape[0] * x.shape[2] * x.shape[3] * (4 if upsample_2x else 1)
    return pixels >= MIN_PIXELS and channels * filters >= MIN_SAVING * (channels + filters)


def _has_kernels(device: torch.device) -> bool:
    """Return whether there are kernels for this GPU that are faster than torch's, with scratch memory allowed."""
    try:
        gpu = kernels.gpu_kernels()
    except kernels.UnsupportedCall:
        return False
    assert isinstance(gpu, kernels.GpuKernels)
    return not gpu.without_workspace and kernels.is_hopper_or_newer(device)
