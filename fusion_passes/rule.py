"""Passes made of rules: a rule is a pattern, the reasons to refuse what matches it, and what takes its place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import MatchResult, RewriteRule, RewriteRuleClassBase, RewriteRuleSet

from fusion_passes.checks import unanswered
from fusion_passes.pass_ import Case, Outcome, Pass, Refusal
from fusion_passes.shapes.infer import annotate_new
from fusion_passes.tidy import operators, tidy


class _Rooted(RewriteRule):
    """A rule that is tried at nodes of its last operator alone: few are, and trying costs more than all else."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        identifier = self._target_pattern.output_nodes[-1].op_identifier()
        self.root = None if identifier is None else identifier[1]

    def try_rewrite(self, model: ir.Model, graph: Any, node: ir.Node, **options: Any) -> Any:
        return super().try_rewrite(model, graph, node, **options) if self.root in (None, node.op_type) else None


class Rule(RewriteRuleClassBase):
    """A rewrite rule that says why it refuses.

    Subclasses write `pattern` (what must be there), `refuse` (what else must hold: the reason why not, or None) and
    `rewrite` (what takes its place).
    """

    def __init__(self, refused: list[Refusal], *, remove_nodes: bool = True) -> None:
        super().__init__(remove_nodes=remove_nodes)
        self.refused = refused

    @classmethod
    def rule(cls, *args: Any, **options: Any) -> _Rooted:
        """The rule as the rewriter takes it."""
        made = cls(*args, **options)
        return _Rooted(made.pattern, made.rewrite, made.check, name=made.name, remove_nodes=made.remove_nodes)

    def refuse(self, **bindings: Any) -> str | None:
        """Why the matched nodes must stay as they are, or None when they may be replaced."""
        return None

    def check(self, context: Any, **bindings: Any) -> MatchResult:
        unanswered.clear()
        reason = self.refuse(**bindings)
        if reason is None:
            return MatchResult()
        self.refused.append(Refusal(context.root, reason, unanswered[-1] if unanswered else None))
        return MatchResult().fail(reason)


def apply(model: ir.Model, rules: Sequence[type[Rule]], name: str = "") -> Outcome:
    """Apply `rules` in place, in order at every node; counts how often they fired under `name`."""
    refused: list[Refusal] = []
    there = operators(model.graph)
    made = [rule.rule(refused) for rule in rules]
    # One rule may make what another one looks for: all are tried, or none.
    some = any(rule.root is None or rule.root in there for rule in made)
    count = RewriteRuleSet(made).apply_to_model(model) if some else 0
    if count:
        tidy(model)  # a replacement with several outputs may have landed behind one of its readers
        annotate_new(model.graph)
    # One rule may have taken what another refused.
    left = dict.fromkeys(refusal for refusal in refused if refusal.node.graph is not None)
    return Outcome(Counter({name: count}), list(left))


def rule_pass(name: str, rules: Sequence[type[Rule]], cases: Sequence[Case]) -> Pass:
    """The pass that applies `rules` once."""
    return Pass(name, lambda model: apply(model, rules, name), cases)
