"""Passes made of rules: a rule is a pattern, the reasons to refuse what matches it, and what takes its place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as common
from onnxscript.rewriter import MatchResult, RewriteRuleClassBase, RewriteRuleSet

from fusion_passes.pass_ import Case, Outcome, Pass, Refusal
from fusion_passes.shapes.infer import annotate


class Rule(RewriteRuleClassBase):
    """A rewrite rule that says why it refuses.

    Subclasses write `pattern` (what must be there), `refuse` (what else must hold: the reason why not, or None) and
    `rewrite` (what takes its place).
    """

    def __init__(self, refused: list[Refusal], *, remove_nodes: bool = True) -> None:
        super().__init__(remove_nodes=remove_nodes)
        self.refused = refused

    def refuse(self, **bindings: Any) -> str | None:
        """Why the matched nodes must stay as they are, or None when they may be replaced."""
        return None

    def check(self, context: Any, **bindings: Any) -> MatchResult:
        reason = self.refuse(**bindings)
        if reason is None:
            return MatchResult()
        self.refused.append(Refusal(context.root, reason))
        return MatchResult().fail(reason)


def apply(model: ir.Model, rules: Sequence[type[Rule]], name: str = "") -> Outcome:
    """Apply `rules` in place, in order at every node; counts how often they fired under `name`."""
    refused: list[Refusal] = []
    count = RewriteRuleSet([rule.rule(refused) for rule in rules]).apply_to_model(model)
    if count:
        common.IdentityEliminationPass()(model)
        common.RemoveUnusedNodesPass()(model)
        # A replacement with several outputs may have landed behind one of its readers.
        common.TopologicalSortPass()(model)
        annotate(model.graph)
    # One rule may have taken what another refused.
    left = dict.fromkeys(refusal for refusal in refused if refusal.node.graph is not None)
    return Outcome(Counter({name: count}), list(left))


def rule_pass(name: str, rules: Sequence[type[Rule]], cases: Sequence[Case]) -> Pass:
    """The pass that applies `rules` once."""
    return Pass(name, lambda model: apply(model, rules, name), cases)
