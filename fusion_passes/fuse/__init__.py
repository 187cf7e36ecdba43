"""Fusions: subgraphs of a canonical graph become one fused operator each, one file per fusion."""

from __future__ import annotations

from collections.abc import Sequence

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
from fusion_passes.pass_ import Outcome, Pass, run_all

# SkipLayerNormalization takes the sums a normalization follows; BiasAdd takes those that are left.
FUSIONS: tuple[Pass, ...] = (
    multi_head_attention.PASS,
    group_norm.PASS,
    bias_split_gelu.PASS,
    quick_gelu.PASS,
    skip_layer_normalization.PASS,
    bias_add.PASS,
    skip_group_norm.PASS,
)


def fuse(model: ir.Model, fusions: Sequence[Pass] = FUSIONS) -> dict[str, Outcome]:
    """Apply `fusions` in place to a canonical model (none where `why_not_fused`); returns what each did, by name."""
    if why_not_fused(model):
        return {}
    done = run_all(model, fusions)
    merge_equal(model)
    return done
