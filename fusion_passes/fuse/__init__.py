"""Fusions: each replaces a subgraph of a canonical graph by one fused operator. One module per fusion."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from fusion_passes.canonicalize.opset import unsupported_reason
from fusion_passes.canonicalize.shape_folding import merge_duplicates
from fusion_passes.fuse import (
    adaptive_layer_norm,
    bias_add,
    bias_split_gelu,
    group_norm,
    joint_attention,
    modulated_norm,
    multi_head_attention,
    quick_gelu,
    rms_normalization,
    rotary_embedding,
    skip_group_norm,
    skip_layer_normalization,
)
from fusion_passes.graph_pass import Pass, PassOutcome, run_all

# SkipLayerNormalization replaces sums before a normalization, BiasAdd the remaining ones.
FUSIONS: tuple[Pass, ...] = (
    multi_head_attention.PASS,
    group_norm.PASS,
    bias_split_gelu.PASS,
    quick_gelu.PASS,
    skip_layer_normalization.PASS,
    bias_add.PASS,
    skip_group_norm.PASS,
)

# Of diffusion transformers. The order matters: norm and rotation of heads are nodes before the attention is fused.
TRANSFORMER_FUSIONS: tuple[Pass, ...] = (
    rms_normalization.PASS,
    rotary_embedding.PASS,
    joint_attention.PASS,
    adaptive_layer_norm.PASS,
    modulated_norm.PASS,
)


def fuse(model: ir.Model, fusions: Sequence[Pass] = FUSIONS) -> dict[str, PassOutcome]:
    """Apply `fusions` in place to a canonical model and return their outcomes by name; none if `unsupported_reason`."""
    if unsupported_reason(model):
        return {}
    outcomes = run_all(model, fusions)
    merge_duplicates(model)
    return outcomes
