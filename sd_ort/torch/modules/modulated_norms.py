"""Norms of diffusion transformers as one operator with their scale and shift, and with the gated sum before them.

A modified norm layer (a hook, an offloaded weight) is called as it is.
"""

from __future__ import annotations

import torch
from diffusers.models.normalization import (
    AdaLayerNormContinuous,
    AdaLayerNormZero,
    AdaLayerNormZeroSingle,
    RMSNorm,
    SD35AdaLayerNormZeroX,
)
from diffusers.models.transformers.transformer_krea2 import Krea2RMSNorm
from torch import nn

from sd_ort.torch.modules.layer_ops import is_unmodified
from sd_ort.torch.operators import adaptive_norm, skip_adaptive_norm

Tensor = torch.Tensor


def norm(layer: nn.Module | None, x: Tensor) -> Tensor:
    """Return an RMS norm layer of x (B, ..., C); x without a layer."""
    if layer is None:
        return x
    parameters = _parameters(layer, x)
    if parameters is None or parameters[0] is None:
        return layer(x)
    return adaptive_norm(x, parameters[0], None, *parameters[1:])


def modulated_norm(
    layer: nn.Module, x: Tensor, scale: Tensor | None, shift: Tensor | None = None,
    gate: Tensor | None = None, skip: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return layer(total) * scale + shift and total, where total is gate * x + skip, or x without skip.

    x and skip are (B, S, C); scale, shift and gate (B, 1, C) or None.
    """
    parameters = _parameters(layer, x)
    factor = _product(scale, None if parameters is None else parameters[0])
    if parameters is None or factor is None:
        total = x if skip is None else gated_sum(gate, x, skip)
        y = layer(total)
        y = y if scale is None else y * scale
        return y if shift is None else y + shift, total
    _, epsilon, rms = parameters
    factor = factor.to(x.dtype)
    if skip is None:
        return adaptive_norm(x, factor, shift, epsilon, rms), x
    return skip_adaptive_norm(x, gate, skip, factor, shift, epsilon, rms)


def gated_sum(gate: Tensor | None, x: Tensor, skip: Tensor) -> Tensor:
    """Return gate * x + skip; gate is (B, 1, C) or None for 1."""
    return skip + x if gate is None else torch.addcmul(skip, gate, x)


def _product(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    return second if first is None else first if second is None else first * second


def _parameters(layer: nn.Module, x: Tensor) -> tuple[Tensor | None, float, bool] | None:
    """Return weight, epsilon and whether it is an RMS norm; None for unsupported layers."""
    if is_unmodified(layer, nn.LayerNorm) and layer.weight is None:
        return None, layer.eps, False
    if is_unmodified(layer, Krea2RMSNorm):
        return (layer.weight + 1.0).to(x.dtype), layer.eps, True  # type: ignore[operator, return-value, union-attr]
    has_weight = is_unmodified(layer, nn.RMSNorm) or (is_unmodified(layer, RMSNorm) and layer.bias is None)
    if has_weight and layer.weight is not None and layer.weight.dtype == x.dtype and layer.eps is not None:
        return layer.weight, layer.eps, True  # type: ignore[return-value]
    return None


class FastAdaLayerNormZero(AdaLayerNormZero):
    """AdaLayerNormZero with its norm, scale and shift as one operator."""

    def forward(
        self,
        x: Tensor,
        timestep: Tensor | None = None,
        class_labels: Tensor | None = None,
        hidden_dtype: torch.dtype | None = None,
        emb: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        if self.emb is not None:
            emb = self.emb(timestep, class_labels, hidden_dtype=hidden_dtype)
        shift, scale, *others = self.linear(self.silu(emb)).chunk(6, dim=1)
        return modulated_norm(self.norm, x, 1 + scale[:, None], shift[:, None])[0], *others


class FastAdaLayerNormZeroSingle(AdaLayerNormZeroSingle):
    """AdaLayerNormZeroSingle with its norm, scale and shift as one operator."""

    def forward(self, x: Tensor, emb: Tensor | None = None) -> tuple[Tensor, Tensor]:
        shift, scale, gate = self.linear(self.silu(emb)).chunk(3, dim=1)
        return modulated_norm(self.norm, x, 1 + scale[:, None], shift[:, None])[0], gate


class FastSD35AdaLayerNormZeroX(SD35AdaLayerNormZeroX):
    """SD35AdaLayerNormZeroX with each norm, scale and shift as one operator."""

    def forward(self, hidden_states: Tensor, emb: Tensor | None = None) -> tuple[Tensor, ...]:
        shift, scale, *others, shift2, scale2, gate2 = self.linear(self.silu(emb)).chunk(9, dim=1)
        y = modulated_norm(self.norm, hidden_states, 1 + scale[:, None], shift[:, None])[0]
        y2 = modulated_norm(self.norm, hidden_states, 1 + scale2[:, None], shift2[:, None])[0]
        return y, *others, y2, gate2


class FastAdaLayerNormContinuous(AdaLayerNormContinuous):
    """AdaLayerNormContinuous with its norm, scale and shift as one operator."""

    def forward(self, x: Tensor, conditioning_embedding: Tensor) -> Tensor:
        scale, shift = self.linear(self.silu(conditioning_embedding).to(x.dtype)).chunk(2, dim=1)
        return modulated_norm(self.norm, x, (1 + scale)[:, None], shift[:, None])[0]
