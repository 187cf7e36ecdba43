"""Canonicalization: the patterns of five exporters become one canonical form, so each fusion has one pattern."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common

from fusion_passes import CONTRIB
from fusion_passes import value_queries as values
from fusion_passes.canonicalize import (
    attention,
    einsum,
    gelu,
    group_normalization,
    layer_normalization,
    slices,
    splits,
    sums,
    transposes,
)
from fusion_passes.canonicalize.attention import concatenated_keys, onnx_attention, packed_heads, scales, three_axis
from fusion_passes.canonicalize.opset import OPSET, SHAPES_SINCE, declare_opset, unsupported_reason
from fusion_passes.canonicalize.shape_folding import (
    fold_shapes,
    remove_no_ops,
    set_channel_counts,
    simplify_reshape_targets,
)
from fusion_passes.graph_pass import Pass, PassOutcome
from fusion_passes.rule import apply_rules
from fusion_passes.shapes import types

__all__ = ["CANONICAL", "canonicalize", "unsupported_reason"]

CANONICAL: tuple[Pass, ...] = (
    slices.PASS,
    einsum.PASS,
    group_normalization.PASS,
    gelu.PASS,
    layer_normalization.PASS,
    splits.PASS,
    sums.PASS,
    transposes.PASS,
    scales.PASS,
    attention.PASS,
    three_axis.PASS,
    concatenated_keys.PASS,
    packed_heads.PASS,
)


def canonicalize(model: ir.Model) -> dict[str, PassOutcome]:
    """Canonicalize `model` in place and return the outcomes of the passes that ran, by name.

    The order matters. Old opsets come first, then shapes, because every rule queries them; then the two operators whose
    definition depends on the opset; then the opset; then operators that exporters decompose. If the opset cannot be
    converted (see `unsupported_reason`), only the shapes are folded, below `SHAPES_SINCE` not even these.
    """
    outcomes: dict[str, PassOutcome] = {}
    common.RemoveUnusedFunctionsPass()(model)
    common.InlinePass(lambda function: function.domain != CONTRIB)(model)  # ONNX Runtime runs its kernel, not the body
    if types.opset(model.graph) < SHAPES_SINCE and not (declare_opset(model) or declare_opset(model, SHAPES_SINCE)):
        return outcomes
    set_channel_counts(model)
    fold_shapes(model)
    if unsupported_reason(model):
        return outcomes
    order_operands(model)
    _run(model, slices.PASS, outcomes)
    _run(model, einsum.PASS, outcomes)
    _run(model, group_normalization.PASS, outcomes)
    _run(model, onnx_attention.PASS, outcomes)
    if declare_opset(model) or model.graph.opset_imports[""] >= OPSET:
        _run(model, gelu.PASS, outcomes)
        _run(model, layer_normalization.PASS, outcomes)
    while sum(_run(model, each, outcomes) for each in (transposes.PASS, scales.PASS, splits.PASS)):
        pass
    _run(model, sums.PASS, outcomes)
    _run(model, attention.PASS, outcomes)
    _run(model, three_axis.PASS, outcomes)
    _run(model, concatenated_keys.PASS, outcomes)
    _run(model, packed_heads.PASS, outcomes)
    apply_rules(model, scales.SDPA_RULES)
    while sum(_run(model, each, outcomes) for each in (transposes.PASS, splits.PASS)):
        pass
    remove_no_ops(model.graph)  # pairs of Transposes that the passes made
    simplify_reshape_targets(model)
    return outcomes


def order_operands(model: ir.Model) -> None:
    """Move a constant first operand of Add and Mul to the second position, so that patterns have one order."""
    for node in model.graph:
        if node.domain or node.op_type not in ("Add", "Mul"):
            continue
        a, b = node.inputs
        if values.is_constant(a) and not values.is_constant(b):
            node.replace_input_with(0, b)
            node.replace_input_with(1, a)


def _run(model: ir.Model, each: Pass, outcomes: dict[str, PassOutcome]) -> int:
    """Run a pass, return its number of rewrites, and update `outcomes`: counts add up, rejections are replaced."""
    outcome = each.run(model)
    before = outcomes.get(each.name, PassOutcome())
    outcomes[each.name] = PassOutcome(before.counts + outcome.counts, outcome.rejections)
    return outcome.counts.total()
