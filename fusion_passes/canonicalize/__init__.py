"""Exporter spellings to one spelling: five exporters, one graph, on which each fusion is written once."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common

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
from fusion_passes.canonicalize.attention import batched, joined, operator, scales
from fusion_passes.canonicalize.facts import fix_channels, fold, reshape_targets
from fusion_passes.canonicalize.operand_order import order_operands
from fusion_passes.canonicalize.opset import OPSET, declare_opset, why_not_fused
from fusion_passes.pass_ import Outcome, Pass
from fusion_passes.rule import apply

__all__ = ["CANONICAL", "canonicalize", "why_not_fused"]

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
    batched.PASS,
    joined.PASS,
)


def canonicalize(model: ir.Model) -> dict[str, Outcome]:
    """Rewrite `model` in place; returns what each pass of `CANONICAL` that ran did, by its name.

    The order matters: shapes first, since every rule asks for them; then the two operators whose meaning depends on
    the opset; then the opset; then what is spelled out of smaller operators. A graph of an opset that cannot be raised
    (see `why_not_fused`) has its shapes folded, no more.
    """
    done: dict[str, Outcome] = {}
    common.InlinePass()(model)
    fix_channels(model)
    fold(model)
    if why_not_fused(model):
        return done
    order_operands(model)
    _run(model, slices.PASS, done)
    _run(model, einsum.PASS, done)
    _run(model, group_normalization.PASS, done)
    _run(model, operator.PASS, done)
    if declare_opset(model) or model.graph.opset_imports[""] >= OPSET:
        _run(model, gelu.PASS, done)
        _run(model, layer_normalization.PASS, done)
    while sum(_run(model, each, done) for each in (transposes.PASS, scales.PASS, splits.PASS)):
        pass
    _run(model, sums.PASS, done)
    _run(model, attention.PASS, done)
    _run(model, batched.PASS, done)
    _run(model, joined.PASS, done)
    apply(model, scales.AFTER)
    while sum(_run(model, each, done) for each in (transposes.PASS, splits.PASS)):
        pass
    reshape_targets(model)
    return done


def _run(model: ir.Model, each: Pass, done: dict[str, Outcome]) -> int:
    """Run a pass; whether it changed something. What it refuses now counts, not what it refused before."""
    outcome = each.run(model)
    before = done.get(each.name, Outcome())
    done[each.name] = Outcome(before.counts + outcome.counts, outcome.refused)
    return outcome.counts.total()
