"""Layers as functions: Linear and Conv2d that leave the bias to the next operator, and GroupNorm.

A modified layer (peft's LoRA, a hook, an offloaded weight) is called as it is, and adds its own bias.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from sd_ort.torch.operators import bias_add, group_norm, skip_group_norm
from sd_ort.torch.operators.group_norm import is_channels_last

Tensor = torch.Tensor


def is_unmodified(layer: nn.Module, cls: type[nn.Module]) -> bool:
    """Return whether a call of the layer is only torch's function of its parameters: class `cls`, no hooks.

    `_conv_forward` is what users replace to generate tileable images.
    """
    overridden = "forward" in layer.__dict__ or "_conv_forward" in layer.__dict__
    return type(layer) is cls and not (overridden or layer._forward_hooks or layer._forward_pre_hooks)


def linear(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the output of a Linear layer and the bias that the caller must still add, or None."""
    if is_unmodified(layer, nn.Linear) and layer.bias is not None:
        return F.linear(x, layer.weight), layer.bias  # type: ignore[arg-type, return-value]
    return layer(x), None


def conv(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the output of a Conv2d layer and the bias that the caller must still add, or None.

    A convolution of NCHW images adds its own bias, since the operators need channels last.
    """
    if is_unmodified(layer, nn.Conv2d) and layer.bias is not None and is_channels_last(x):
        return layer._conv_forward(x, layer.weight, None), layer.bias  # type: ignore[operator, return-value]
    return layer(x), None


def is_conv3x3(layer: nn.Module) -> bool:
    """Return whether a layer is an unmodified 3x3 convolution of stride 1 with zero padding 1."""
    if not isinstance(layer, nn.Conv2d) or not is_unmodified(layer, nn.Conv2d):
        return False
    unit = layer.stride == layer.padding == layer.dilation == (1, 1) and layer.groups == 1
    return unit and layer.kernel_size == (3, 3) and layer.padding_mode == "zeros"


def is_conv1x1(layer: nn.Module) -> bool:
    """Return whether a layer is an unmodified 1x1 convolution, which is a MatMul for each pixel."""
    if not isinstance(layer, nn.Conv2d) or not is_unmodified(layer, nn.Conv2d):
        return False
    return layer.kernel_size == layer.stride == (1, 1) and layer.padding == (0, 0) and layer.groups == 1


def conv1x1(layer: nn.Module, x: Tensor) -> Tensor:
    """Return a layer of x (N, C, H, W), bias included. A 1x1 convolution of channels-last images runs as a MatMul."""
    if is_channels_last(x) and is_conv1x1(layer):
        y = F.linear(x.permute(0, 2, 3, 1), layer.weight.flatten(1), layer.bias)  # type: ignore[operator, arg-type]
        return y.permute(0, 3, 1, 2)
    return layer(x)


def add_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    """Return x (N, C, H, W) + bias (C); with wide memory accesses for channels-last x, which torch's sum lacks."""
    if bias is None:
        return x
    if torch.compiler.is_compiling() or not is_channels_last(x):  # a compiler fuses it into the next operator
        return x + bias[:, None, None]
    return bias_add(x.permute(0, 2, 3, 1), bias).permute(0, 3, 1, 2)


def add(x: Tensor, bias: Tensor | None, skip: Tensor) -> Tensor:
    """Return x + bias + skip for images (N, C, H, W) or tensors (..., C)."""
    if bias is None:
        return x + skip
    if x.ndim == 4:
        return bias_add(x.permute(0, 2, 3, 1), bias, skip.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    return bias_add(x, bias, skip)


def norm(layer: nn.Module, x: Tensor, silu: bool = False) -> Tensor:
    """Return nn.GroupNorm of x (N, C, ...), followed by SiLU if `silu`."""
    if is_unmodified(layer, nn.GroupNorm):
        return group_norm(x, layer.weight, layer.bias, layer.num_groups, layer.eps, silu)  # type: ignore[arg-type]
    y: Tensor = layer(x)
    return F.silu(y) if silu else y


def norm_of_sum(layer: nn.Module, x: Tensor, bias: Tensor | None, per_image: Tensor | None) -> Tensor:
    """Return GroupNorm and SiLU of x (N, C, H, W) + bias (C) + per_image (N, C)."""
    if per_image is None and bias is not None:
        per_image, bias = bias.expand(x.shape[0], -1), None
    if per_image is None:
        return norm(layer, x, silu=True)
    if not is_unmodified(layer, nn.GroupNorm):
        return norm(layer, x + (per_image if bias is None else per_image + bias)[:, :, None, None], silu=True)
    weights = (layer.weight, layer.bias, layer.num_groups, layer.eps)
    return skip_group_norm(x, per_image, bias, *weights, True, False)[0]  # type: ignore[arg-type]
