"""Passes that consist of onnxscript rewrite rules, each with a pattern, reject reasons and a replacement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import MatchResult, RewriteRule, RewriteRuleClassBase, RewriteRuleSet

from fusion_passes.cleanup import clean_up, op_types
from fusion_passes.graph_pass import Pass, PassCase, PassOutcome, Rejection
from fusion_passes.shapes.infer import annotate_new
from fusion_passes.value_queries import unknown_values


class _RootFilteredRule(RewriteRule):
    """A rewrite rule that is tried only at nodes of its root operator. Matching dominates the time of a rule."""

    def __init__(self, rule: Rule) -> None:
        super().__init__(rule.graph_pattern(), rule.rewrite, rule.check, name=rule.name, remove_nodes=rule.remove_nodes)
        self.root = rule.root()

    def try_rewrite(self, model: ir.Model, graph: Any, node: ir.Node, **options: Any) -> Any:
        return super().try_rewrite(model, graph, node, **options) if self.root in (None, node.op_type) else None


class Rule(RewriteRuleClassBase):
    """A rewrite rule that records why it rejects a match.

    Subclasses define `pattern` (the subgraph to match), `reject_reason` (why a match must stay, or None) and `rewrite`
    (the replacement). `remove_nodes`: False leaves the matched nodes to a later pass, so that they may have other
    consumers.
    """

    remove_nodes = True

    def __init__(self, rejections: list[Rejection]) -> None:
        super().__init__(remove_nodes=self.remove_nodes)
        self.rejections = rejections

    @classmethod
    @cache
    def graph_pattern(cls) -> Any:
        """Return onnxscript's form of the pattern, built once: building took a third of optimizing a small graph."""
        rule = cls([])
        return RewriteRule(rule.pattern, rule.rewrite)._target_pattern

    @classmethod
    def root(cls) -> str | None:
        """Return the operator of the pattern's root node, or None if it may be several."""
        identifier = cls.graph_pattern().output_nodes[-1].op_identifier()
        return None if identifier is None else str(identifier[1])

    def reject_reason(self, **bindings: Any) -> str | None:
        """Return why the matched nodes must stay, or None if they may be replaced."""
        return None

    def check(self, context: Any, **bindings: Any) -> MatchResult:
        unknown_values.clear()
        reason = self.reject_reason(**bindings)
        if reason is None:
            return MatchResult()
        self.rejections.append(Rejection(context.root, reason, unknown_values[-1] if unknown_values else None))
        return MatchResult().fail(reason)


def apply_rules(model: ir.Model, rules: Sequence[type[Rule]], name: str = "") -> PassOutcome:
    """Apply `rules` in place, in order at every node, and count the rewrites under `name`."""
    rejections: list[Rejection] = []
    present = op_types(model.graph) | {None}
    # A rule may create the root operator of another one, so all rules are tried or none.
    applicable = any(rule.root() in present for rule in rules)
    rewriters = [_RootFilteredRule(rule(rejections)) for rule in rules] if applicable else []
    count = RewriteRuleSet(rewriters).apply_to_model(model) if applicable else 0
    if count:
        clean_up(model)  # a replacement with several outputs may come after one of its consumers
        annotate_new(model.graph)
    # A node that one rule rejected may have been replaced by another.
    remaining = dict.fromkeys(rejection for rejection in rejections if rejection.node.graph is not None)
    return PassOutcome(Counter({name: count}), list(remaining))


def rule_pass(name: str, rules: Sequence[type[Rule]], cases: Sequence[PassCase]) -> Pass:
    """Return the pass that applies `rules` once."""
    return Pass(name, lambda model: apply_rules(model, rules, name), cases)
