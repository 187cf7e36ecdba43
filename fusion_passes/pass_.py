"""What every pass shows of itself: the graphs that it must, and must not, change."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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
