"""Exporter spellings to one spelling: five exporters, one graph, on which each fusion is written once."""

from __future__ import annotations

from collections import Counter
from types import ModuleType

import onnx_ir as ir
import onnx_ir.passes.common as common

from fusion_passes.canonicalize import attention, gelu, group_normalization, layer_normalization, transposes
from fusion_passes.canonicalize.facts import fix_channels, fold, reshape_targets
from fusion_passes.canonicalize.operand_order import order_operands
from fusion_passes.canonicalize.opset import OPSET, declare_opset, why_not_fused
from fusion_passes.canonicalize.slices import merge_slices
from fusion_passes.rule import apply

CANONICAL: tuple[ModuleType, ...] = (group_normalization, gelu, layer_normalization, transposes, attention)

__all__ = ["CANONICAL", "canonicalize", "fold", "why_not_fused"]


def canonicalize(model: ir.Model) -> Counter[str]:
    """Rewrite `model` in place; returns how often each module's rules fired.

    The order matters: shapes first, since every rule asks for them; then the two operators whose meaning depends on
    the opset; then the opset; then what is spelled out of smaller operators. A graph of an opset that cannot be raised
    (see `why_not_fused`) has its shapes folded, no more.
    """
    counts: Counter[str] = Counter()
    common.InlinePass()(model)
    fix_channels(model)
    fold(model)
    if why_not_fused(model):
        return counts
    order_operands(model)
    counts["slices"] += merge_slices(model)
    counts["group_normalization"] += apply(model, group_normalization.RULES)
    counts["attention"] += apply(model, [attention.FromAttention])
    if declare_opset(model) or model.graph.opset_imports[""] >= OPSET:
        counts["gelu"] += apply(model, gelu.RULES)
        counts["layer_normalization"] += apply(model, layer_normalization.RULES)
    while changed := apply(model, transposes.RULES) + apply(model, attention.SCALES):
        counts["transposes"] += changed
    counts["attention"] += apply(model, attention.RULES)
    apply(model, attention.AFTER)
    while changed := apply(model, transposes.RULES):
        counts["transposes"] += changed
    reshape_targets(model)
    return counts
