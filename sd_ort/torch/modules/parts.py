"""What the modules are made of: products and convolutions that leave their bias to the next operator, and norms.

A layer that is more than torch's own (peft's LoRA, a hook, an offloaded weight) is called as it is, its bias included.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from sd_ort.torch.operators import bias_add, group_norm, skip_group_norm
from sd_ort.torch.operators.group_norm import is_channels_last

Tensor = torch.Tensor


def is_plain(layer: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether calling the layer is nothing but torch's own function of its parameters."""
    changed = "forward" in layer.__dict__ or "_conv_forward" in layer.__dict__  # the second to make tiles of images
    return type(layer) is kind and not (changed or layer._forward_hooks or layer._forward_pre_hooks)


def linear(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """The layer's product, and its bias where it is still to be added."""
    if is_plain(layer, nn.Linear) and layer.bias is not None:
        return F.linear(x, layer.weight), layer.bias  # type: ignore[arg-type, return-value]
    return layer(x), None


def conv(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """The same of a convolution. One of NCHW images adds its own bias: the operators want channels last."""
    if is_plain(layer, nn.Conv2d) and layer.bias is not None and is_channels_last(x):
        return layer._conv_forward(x, layer.weight, None), layer.bias  # type: ignore[operator, return-value]
    return layer(x), None


def is_three_by_three(layer: nn.Module) -> bool:
    """Whether a layer is a convolution by 3 x 3 filters that move by one, with zeros around the image."""
    if not isinstance(layer, nn.Conv2d) or not is_plain(layer, nn.Conv2d):
        return False
    steps = layer.stride == layer.padding == layer.dilation == (1, 1) and layer.groups == 1
    return steps and layer.kernel_size == (3, 3) and layer.padding_mode == "zeros"


def is_pointwise(layer: nn.Module) -> bool:
    """Whether a layer is a product for each pixel."""
    if not isinstance(layer, nn.Conv2d) or not is_plain(layer, nn.Conv2d):
        return False
    return layer.kernel_size == layer.stride == (1, 1) and layer.padding == (0, 0) and layer.groups == 1


def pointwise(layer: nn.Module, x: Tensor) -> Tensor:
    """A 1 x 1 convolution or another layer of x (N, C, H, W): of channels-last images by a product, with its bias."""
    if is_channels_last(x) and is_pointwise(layer):
        y = F.linear(x.permute(0, 2, 3, 1), layer.weight.flatten(1), layer.bias)  # type: ignore[operator, arg-type]
        return y.permute(0, 3, 1, 2)
    return layer(x)


def biased(x: Tensor, bias: Tensor | None) -> Tensor:
    """x (N, C, H, W) + bias (C), with wide accesses where x is channels last; torch's sum has none."""
    if bias is None:
        return x
    if torch.compiler.is_compiling() or not is_channels_last(x):  # a compiler makes it part of what follows
        return x + bias[:, None, None]
    return bias_add(x.permute(0, 2, 3, 1), bias).permute(0, 3, 1, 2)


def add(x: Tensor, bias: Tensor | None, skip: Tensor) -> Tensor:
    """x + bias + skip: images (N, C, H, W), or (..., C)."""
    if bias is None:
        return x + skip
    if x.ndim == 4:
        return bias_add(x.permute(0, 2, 3, 1), bias, skip.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    return bias_add(x, bias, skip)


def norm(layer: nn.Module, x: Tensor, silu: bool = False) -> Tensor:
    """nn.GroupNorm of x (N, C, ...), SiLU behind it if asked."""
    if is_plain(layer, nn.GroupNorm):
        return group_norm(x, layer.weight, layer.bias, layer.num_groups, layer.eps, silu)  # type: ignore[arg-type]
    y: Tensor = layer(x)
    return F.silu(y) if silu else y


def norm_of_sum(layer: nn.Module, x: Tensor, bias: Tensor | None, per_image: Tensor | None) -> Tensor:
    """GroupNorm and SiLU of x (N, C, H, W) + bias (C) + per_image (N, C)."""
    if per_image is None and bias is not None:
        per_image, bias = bias.expand(x.shape[0], -1), None
    if per_image is None:
        return norm(layer, x, silu=True)
    if not is_plain(layer, nn.GroupNorm):
        return norm(layer, x + (per_image if bias is None else per_image + bias)[:, :, None, None], silu=True)
    weights = (layer.weight, layer.bias, layer.num_groups, layer.eps)
    return skip_group_norm(x, per_image, bias, *weights, True, False)[0]  # type: ignore[arg-type]
