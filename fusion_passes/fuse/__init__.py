"""Fusions: subgraphs of a canonical graph become one fused operator each, one file a fusion."""

from __future__ import annotations

from collections import Counter
from types import ModuleType

import onnx_ir as ir

from fusion_passes.canonicalize.facts import merge_equal
from fusion_passes.canonicalize.opset import why_not_fused
from fusion_passes.fuse import (
    bias_add,
    bias_split_gelu,
    group_norm,
    multi_head_attention,
    quick_gelu,
    skip_group_norm,
    skip_layer_normalization,
)
from fusion_passes.rule import apply

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
