"""Which regions of a graph are worth another layout: connected nodes are moved together or not at all.

A region costs a Transpose for every value that enters or leaves it in the old layout, and saves those that stand at its
borders already. One that saves as many as it costs is moved. Of the others those with most convolutions come first, as
long as the whole graph ends with at most `MAY_ADD` Transposes more than it had (its image comes in and goes out in the
old layout), and only where that is fewer than a provider makes for itself around each convolution in the old layout.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

MAY_ADD = 2
HIDDEN = 2  # Transposes in a GPU library's convolution of a tensor that is not channels last


@dataclass(frozen=True)
class Borders:
    """Transposes around what may be moved: `entering`, made for values of the old layout; `leaving`, Transposes in the
    graph that read moved values in the new layout; `undone`, those in the graph whose results are read in it."""

    entering: Mapping[ir.Value, ir.Node]
    leaving: Collection[ir.Node]
    undone: Collection[ir.Node]


@dataclass(frozen=True)
class Region:
    """Nodes that are moved together, in the order of the graph; the Transposes that this adds, or removes (below 0)."""

    nodes: Sequence[ir.Node]
    added: int

    @property
    def convolutions(self) -> int:
        """How many of its nodes are convolutions."""
        return sum(node.op_type == "Conv" for node in self.nodes)


def choose(moved: Sequence[ir.Node], borders: Borders) -> tuple[list[Region], list[Region]]:
    """The connected regions of `moved`, whose inputs come first: those that are worth it, and those that are not."""
    found = [Region(nodes, _added(set(nodes), borders)) for nodes in _connected(moved)]
    taken = [region for region in found if region.added <= 0]
    left = [region for region in found if region.added > 0]
    total = sum(region.added for region in taken)
    for region in sorted(left, key=lambda region: (-region.convolutions, region.added)):
        if region.added < HIDDEN * region.convolutions and total + region.added <= MAY_ADD:
            taken.append(region)
            left.remove(region)
            total += region.added
    return taken, left


def _connected(moved: Sequence[ir.Node]) -> list[list[ir.Node]]:
    leader = {node: node for node in moved}

    def find(node: ir.Node) -> ir.Node:
        while leader[node] is not node:
            leader[node] = node = leader[leader[node]]
        return node

    for node in moved:
        for value in node.inputs:
            source = None if value is None else value.producer()
            if source in leader:
                leader[find(node)] = find(source)
    regions: dict[ir.Node, list[ir.Node]] = {}
    for node in moved:
        regions.setdefault(find(node), []).append(node)
    return list(regions.values())


def _added(nodes: set[ir.Node], borders: Borders) -> int:
    read = dict.fromkeys(value for node in nodes for value in node.inputs if value is not None)
    added = sum(value in borders.entering and borders.entering[value].op_type == "Transpose" for value in read)
    for value in read:
        source = value.producer()
        if source in borders.undone and not value.is_graph_output():
            added -= all(user in nodes for user, _ in value.uses())
    for value in (output for node in nodes for output in node.outputs):
        users = [user for user, _ in value.uses() if user not in nodes]
        added -= sum(user in borders.leaving for user in users)
        added += value.is_graph_output() or any(user not in borders.leaving for user in users)
    return added
