"""Base types of a graph pass: its result, its test cases, and how passes run.

Each pass is one module: a docstring with the graph before and after and what is rejected, the code, the cases, and
`PASS` at its end. tests/fusion_passes/test_fusions.py runs every pass over its cases. It checks the number of
rewrites, the remaining nodes and the outputs before and after; for a rejection, the reason and an unchanged graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import onnx_ir as ir


@dataclass(frozen=True)
class Rejection:
    """A rejected match: its root node, the reason, and the value whose shape or constant was unknown, if any."""

    node: ir.Node
    reason: str
    value: ir.Value | None = None


@dataclass
class PassOutcome:
    """Result of a pass: the number of rewrites by name, and the rejected matches."""

    counts: Counter[str] = field(default_factory=Counter)
    rejections: list[Rejection] = field(default_factory=list)

    def __iadd__(self, other: PassOutcome) -> PassOutcome:
        self.counts.update(other.counts)
        self.rejections += other.rejections
        return self

    def reason_counts(self) -> Counter[str]:
        """Return the number of rejected matches by reason."""
        return Counter(rejection.reason for rejection in self.rejections)


@dataclass(frozen=True)
class PassCase:
    """A test case of a pass: a graph in ONNX text and the expected result.

    Values that the graph's header declares and no node computes become weights: random, non-zero and distinct, seeded
    by name. `rewrites` is the expected number of rewrites. `ops` has the expected node counts after the pass; other
    operators are not checked. `rejection` is a part of the expected reason. `sizes` has the sizes of the symbolic
    dimensions for the run before and after.
    """

    name: str
    graph: str
    rewrites: int = 1
    ops: dict[str, int] = field(default_factory=dict)
    rejection: str | None = None
    sizes: dict[str, int] = field(default_factory=dict)


def case_makers(sizes: dict[str, int]) -> tuple[partial[PassCase], partial[PassCase]]:
    """Return PassCase with these sizes, and the same for rejected cases, without rewrites."""
    return partial(PassCase, sizes=sizes), partial(PassCase, sizes=sizes, rewrites=0)


@dataclass(frozen=True)
class Pass:
    """An in-place rewrite of a model.

    `name` is the name of its module; passes of the same name are equal. `runs_after` are passes that must run earlier
    if they run at all. `rounds_to_bfloat16`: the pass introduces operators that round their inputs to bfloat16.
    """

    name: str
    run: Callable[[ir.Model], PassOutcome] = field(compare=False, repr=False)
    cases: Sequence[PassCase] = field(default=(), compare=False, repr=False)
    runs_after: tuple[Pass, ...] = field(default=(), compare=False, repr=False)
    rounds_to_bfloat16: bool = field(default=False, compare=False, repr=False)


def run_all(model: ir.Model, passes: Iterable[Pass]) -> dict[str, PassOutcome]:
    """Run `passes` in order, in place, and return their outcomes by pass name."""
    outcomes: dict[str, PassOutcome] = {}
    for each in passes:
        outcome = outcomes.setdefault(each.name, PassOutcome())
        outcome += each.run(model)
    return outcomes


def totals(*runs: Mapping[str, PassOutcome]) -> dict[str, int]:
    """Return the number of rewrites by name over several runs, without zeros."""
    total: Counter[str] = Counter()
    for outcome in (outcome for run in runs for outcome in run.values()):
        total.update(outcome.counts)
    return {name: count for name, count in total.items() if count}


def rewrite_nodes(
    model: ir.Model,
    name: str,
    candidates: str | Callable[[ir.Node], bool],
    reject_reason: Callable[[ir.Node], str | None],
    rewrite: Callable[[ir.Graph, ir.Node], None],
) -> PassOutcome:
    """Rewrite every candidate for which `reject_reason` returns None; count the rewrites under `name`.

    candidates: an operator type, or a predicate. Nodes that are no candidates are not recorded as rejections.
    """
    outcome = PassOutcome()
    for node in list(model.graph):
        if node.op_type != candidates if isinstance(candidates, str) else not candidates(node):
            continue
        reason = reject_reason(node)
        if reason is not None:
            outcome.rejections.append(Rejection(node, reason))
        else:
            rewrite(model.graph, node)
            outcome.counts[name] += 1
    return outcome
