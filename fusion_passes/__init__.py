"""Fusions that turn exporters' subgraphs into the fused operators of ONNX Runtime, in domain `sd_ort`.

`canonicalize` gives every exporter's graph one spelling, `fuse` applies the fusions below in this order. Both work in
place on an `onnx_ir.Model` and never read a weight. Which fused operators a provider runs is not decided here.
"""

from __future__ import annotations

from collections import Counter
from types import ModuleType

import onnx_ir as ir

from fusion_passes import (
    bias_add,
    bias_split_gelu,
    group_norm,
    multi_head_attention,
    quick_gelu,
    skip_group_norm,
    skip_layer_normalization,
)
from fusion_passes._rule import apply
from fusion_passes.canonicalize import (
    attention,
    canonicalize,
    fold,
    gelu,
    group_normalization,
    layer_normalization,
    merge_equal,
    transposes,
    why_not_fused,
)

# SkipLayerNormalization takes the sums a normalization follows; BiasAdd takes those that are left.
FUSIONS: tuple[ModuleType, ...] = (
    multi_head_attention,
    group_norm,
    bias_split_gelu,
    quick_gelu,
    skip_layer_normalization,
    bias_add,
    skip_group_norm,
)
CANONICAL: tuple[ModuleType, ...] = (group_normalization, gelu, layer_normalization, transposes, attention)

__all__ = ["CANONICAL", "FUSIONS", "canonicalize", "canonicalize_shapes", "fuse", "why_not_fused"]


def fuse(model: ir.Model, leave: frozenset[str] = frozenset()) -> Counter[str]:
    """Apply the fusions in place to a canonical model, but for those named in `leave` (none where `why_not_fused`).

    Returns how often each fired, by module name.
    """
    counts: Counter[str] = Counter()
    if why_not_fused(model):
        return counts
    for module in FUSIONS:
        name = module.__name__.rpartition(".")[2]
        if name not in leave:
            counts[name] = apply(model, module.RULES)
    merge_equal(model)
    return counts


def canonicalize_shapes(model: ir.Model) -> None:
    """Fold shape arithmetic again, in place: after function bodies have been inlined they bring their own."""
    fold(model)
