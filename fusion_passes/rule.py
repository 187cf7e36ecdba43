"""The contract of a fusion: one file with its rules, a NumPy reference and its cases.

A fusion module has `RULES` (classes derived from `Rule`, tried in this order at every node), `CASES` (graphs on which
the rules must or must not fire) and, where it makes a new operator, `reference(...)`. One harness in tests/ runs every
module over its cases: how often it fires, which nodes are left, the numbers before and after, and, where it refuses,
an unchanged graph and the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as common
from onnxscript.rewriter import MatchingTracer, MatchResult, MatchStatus, RewriteRuleClassBase, RewriteRuleSet

from fusion_passes.shapes.infer import annotate


class Rule(RewriteRuleClassBase):
    """A rewrite rule that says why it refuses.

    Subclasses write `pattern` (what must be there), `refuse` (what else must hold: the reason why not, or None) and
    `rewrite` (what takes its place).
    """

    def refuse(self, **bindings: Any) -> str | None:
        """Why the matched nodes must stay as they are, or None when they may be replaced."""
        return None

    def check(self, context: Any, **bindings: Any) -> MatchResult:
        reason = self.refuse(**bindings)
        return MatchResult() if reason is None else MatchResult().fail(reason)


def apply(model: ir.Model, rules: Sequence[type[Rule]]) -> int:
    """Apply `rules` in place, in order at every node; returns how often they fired."""
    count = RewriteRuleSet([rule.rule() for rule in rules]).apply_to_model(model)
    if count:
        common.IdentityEliminationPass()(model)
        common.RemoveUnusedNodesPass()(model)
        # A replacement with several outputs may have landed behind one of its readers.
        common.TopologicalSortPass()(model)
        annotate(model.graph)
    return count


class _Refusals(MatchingTracer):
    """Keeps every match whose check said no; the base class keeps only the longest match of each rule."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, ir.Node, str]] = []

    def log(self, rule: Any, container: Any, node: ir.Node, match_result: MatchResult, status: MatchStatus) -> None:
        if status == MatchStatus.CONDITION_FAILED:
            self.found.append((str(rule), node, match_result.reason))


def refusals(model: ir.Model, rules: Sequence[type[Rule]]) -> list[tuple[str, ir.Node, str]]:
    """Where `rules` matched but refused: (rule, node at the end of the match, reason), without changing the model."""
    tracer = _Refusals()
    RewriteRuleSet([rule.rule() for rule in rules]).apply_to_model(model, tracer=tracer)
    return tracer.found
