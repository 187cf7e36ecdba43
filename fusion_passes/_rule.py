"""The contract of a fusion: one file with its rules, a NumPy reference and its cases.

A fusion module has `RULES` (classes derived from `Rule`, tried in this order at every node), `CASES` (graphs on which
the rules must or must not fire) and, where it makes a new operator, `reference(...)`. One harness in tests/ runs every
module over its cases: how often it fires, which nodes are left, the numbers before and after, and, where it refuses,
an unchanged graph and the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as common
from onnxscript.rewriter import MatchingTracer, MatchResult, MatchStatus, RewriteRuleClassBase, RewriteRuleSet

from fusion_passes import _shapes

DOMAIN = "sd_ort"


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


@dataclass(frozen=True)
class Case:
    """A graph in ONNX text and what a fusion must make of it.

    Values declared in the graph's header and made by no node become weights: random, non-zero and distinct, seeded by
    name. `shapes` gives the sizes of the symbolic dimensions for the run before and after; `ops` are node counts
    after the rewrite (only those named are checked); `refused` is a part of the reason that must be given.
    """

    name: str
    graph: str
    fires: int = 1
    ops: dict[str, int] = field(default_factory=dict)
    refused: str | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


def unique(value: ir.Value | None, suffix: str) -> str:
    """A name for an initializer made for the node that yields `value`.

    Registering an initializer under a name in use would drop the old one, which other nodes may read.
    """
    node = None if value is None else value.producer()
    assert value is not None
    assert node is not None
    assert isinstance(node.graph, ir.Graph)
    name, number = f"{value.name}.{suffix}", 1
    while name in node.graph.initializers:
        name, number = f"{value.name}.{suffix}.{number}", number + 1
    return name


def apply(model: ir.Model, rules: Sequence[type[Rule]]) -> int:
    """Apply `rules` in place, in order at every node; returns how often they fired."""
    count = RewriteRuleSet([rule.rule() for rule in rules]).apply_to_model(model)
    if count:
        common.IdentityEliminationPass()(model)
        common.RemoveUnusedNodesPass()(model)
        # A replacement with several outputs may have landed behind one of its readers.
        common.TopologicalSortPass()(model)
        _shapes.annotate(model.graph)
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
