"""Chooses the regions of a graph to convert to NHWC: connected nodes are converted together or not at all.

A region adds a Transpose for every NCHW value that enters or leaves it, and removes existing Transposes at its
boundary. A region that removes at least as many as it adds is converted. Of the others, those with most convolutions
come first, as long as the graph has at most `MAX_ADDED_TRANSPOSES` more than before (for the NCHW image at its input
and output). They must also add fewer Transposes than a provider inserts around each NCHW convolution itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

MAX_ADDED_TRANSPOSES = 2
IMPLICIT_TRANSPOSES = 2  # Transposes that a GPU library runs in a convolution of an NCHW tensor


@dataclass(frozen=True)
class RegionBoundary:
    """Transposes at the boundary of the nodes that may be converted.

    `inserted`: the new Transpose (or Reshape) of each NCHW input. `output_transposes`: existing Transposes of converted
    values to NHWC. `cancelled`: existing Transposes from NHWC, whose inputs are used directly.
    """

    inserted: Mapping[ir.Value, ir.Node]
    output_transposes: Collection[ir.Node]
    cancelled: Collection[ir.Node]


@dataclass(frozen=True)
class Region:
    """Nodes that are converted together, in graph order, and the number of Transposes added (negative: removed)."""

    nodes: Sequence[ir.Node]
    added: int

    @property
    def convolutions(self) -> int:
        """The number of convolutions in the region."""
        return sum(node.op_type == "Conv" for node in self.nodes)


def choose_regions(nodes: Sequence[ir.Node], boundary: RegionBoundary) -> tuple[list[Region], list[Region]]:
    """Return the connected regions of `nodes`, which are in graph order: those to convert, and the rejected ones."""
    regions = [Region(connected, _added(set(connected), boundary)) for connected in _connected(nodes)]
    chosen = [region for region in regions if region.added <= 0]
    rejected = [region for region in regions if region.added > 0]
    total = sum(region.added for region in chosen)
    for region in sorted(rejected, key=lambda region: (-region.convolutions, region.added)):
        if region.added < IMPLICIT_TRANSPOSES * region.convolutions and total + region.added <= MAX_ADDED_TRANSPOSES:
            chosen.append(region)
            rejected.remove(region)
            total += region.added
    return chosen, rejected


def _connected(nodes: Sequence[ir.Node]) -> list[list[ir.Node]]:
    """Return the connected components of `nodes` (union-find)."""
    leader = {node: node for node in nodes}

    def find(node: ir.Node) -> ir.Node:
        while leader[node] is not node:
            leader[node] = node = leader[leader[node]]
        return node

    for node in nodes:
        for value in node.inputs:
            source = None if value is None else value.producer()
            if source in leader:
                leader[find(node)] = find(source)
    regions: dict[ir.Node, list[ir.Node]] = {}
    for node in nodes:
        regions.setdefault(find(node), []).append(node)
    return list(regions.values())


def _added(nodes: set[ir.Node], boundary: RegionBoundary) -> int:
    """Return the number of Transposes that converting `nodes` adds, negative if it removes more."""
    inputs = dict.fromkeys(value for node in nodes for value in node.inputs if value is not None)
    added = sum(value in boundary.inserted and boundary.inserted[value].op_type == "Transpose" for value in inputs)
    for value in inputs:
        source = value.producer()
        if source in boundary.cancelled and not value.is_graph_output():
            added -= all(consumer in nodes for consumer, _ in value.uses())
    for value in (output for node in nodes for output in node.outputs):
        consumers = [consumer for consumer, _ in value.uses() if consumer not in nodes]
        added -= sum(consumer in boundary.output_transposes for consumer in consumers)
        added += value.is_graph_output() or any(each not in boundary.output_transposes for each in consumers)
    return added
