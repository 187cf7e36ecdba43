"""The one contract of every pass: a name, a run that counts what it rewrote and says why it left the rest, its cases.

A pass is one file: a docstring with the graph before and after and what is refused, the code, the cases, and at its end
`PASS`. One harness in tests/ runs every pass over its cases: how often it fires, which nodes are left, the numbers
before and after; where it refuses, the reason and an unchanged graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir


@dataclass(frozen=True)
class Refusal:
    """A site that a pass looked at and left: the node at its end, why, and the value where the proof ended."""

    node: ir.Node
    reason: str
    value: ir.Value | None = None


@dataclass
class Outcome:
    """What a run did: how often it rewrote something, by name, and the sites that it left."""

    counts: Counter[str] = field(default_factory=Counter)
    refused: list[Refusal] = field(default_factory=list)

    def __iadd__(self, other: Outcome) -> Outcome:
        self.counts.update(other.counts)
        self.refused += other.refused
        return self

    def reasons(self) -> Counter[str]:
        """How many sites were left for which reason."""
        return Counter(refusal.reason for refusal in self.refused)


@dataclass(frozen=True)
class Case:
    """A graph in ONNX text and what a pass must make of it.

    Values declared in the graph's header and made by no node become weights: random, non-zero and distinct, seeded by
    name. `sizes` gives the sizes of the symbolic dimensions for the run before and after; `fires` is how often the
    pass must rewrite; `ops` are node counts after it (only those named are checked); `refused` is a part of the reason
    that must be given.
    """

    name: str
    graph: str
    fires: int = 1
    ops: dict[str, int] = field(default_factory=dict)
    refused: str | None = None
    sizes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Pass:
    """A rewrite of a whole model, in place.

    `name` is that of its file; two passes of one name are equal. `after` are the passes that it builds on: where they
    run at all, they run before it. `rounds`: whether what it makes computes with numbers rounded to bfloat16.
    """

    name: str
    run: Callable[[ir.Model], Outcome] = field(compare=False, repr=False)
    cases: Sequence[Case] = field(default=(), compare=False, repr=False)
    after: tuple[Pass, ...] = field(default=(), compare=False, repr=False)
    rounds: bool = field(default=False, compare=False, repr=False)


def run_all(model: ir.Model, passes: Iterable[Pass]) -> dict[str, Outcome]:
    """Run passes one after another, in place; returns what each did, by its name."""
    done: dict[str, Outcome] = {}
    for each in passes:
        outcome = done.setdefault(each.name, Outcome())
        outcome += each.run(model)
    return done


def totals(*runs: Mapping[str, Outcome]) -> dict[str, int]:
    """How often what was rewritten in these runs, but for what never was."""
    total: Counter[str] = Counter()
    for outcome in (outcome for run in runs for outcome in run.values()):
        total.update(outcome.counts)
    return {name: count for name, count in total.items() if count}


def rewrite_nodes(
    model: ir.Model,
    name: str,
    op_type: str,
    refuse: Callable[[ir.Node], str | None],
    rewrite: Callable[[ir.Graph, ir.Node], None],
) -> Outcome:
    """Rewrite the nodes of `op_type` that `refuse` gives no reason to leave; counted under `name`."""
    outcome = Outcome()
    for node in list(model.graph):
        if node.op_type != op_type:
            continue
        reason = refuse(node)
        if reason is not None:
            outcome.refused.append(Refusal(node, reason))
        else:
            rewrite(model.graph, node)
            outcome.counts[name] += 1
    return outcome
