"""Partition of a graph into consecutive subgraphs, for devices that cannot hold all of its weights at once.

The cuts balance the bytes of weights. Among nearly balanced cuts the one with the fewest transferred values is chosen;
after a U-Net's middle block these are the skip connections. Only floating-point values are transferred. Shapes and
other integers, which the host computes, are recomputed in each partition that uses them, so no partition copies data
between host and device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from fusion_passes.shapes.infer import annotate
from sd_ort.core.errors import InputError
from sd_ort.graphs.hoist import all_inputs, cut_subgraph
from sd_ort.graphs.load import load, serialize_over_data

MAX_IMBALANCE = 0.05  # maximum distance of a cut from a balanced one, as a fraction of all weights
MAX_PART_IMBALANCE = 0.25  # the same as a fraction of a partition's weights, for many partitions


@dataclass(frozen=True)
class GraphPartition:
    """A serialized part of a graph, over the data file of the complete graph.

    `weights`: the names of its initializers. `bytes`: their total size.
    """

    graph: bytes
    weights: frozenset[str]
    bytes: int


def partition_graph(path: Path, count: int) -> list[GraphPartition]:
    """Cut the graph at `path` into `count` partitions, each with inputs from the graph and from earlier partitions.

    Raises:
        InputError: if the graph has too few cuts.
    """
    model = load(path)
    annotate(model.graph)
    cuts = _choose_cuts(model.graph, count)
    if len(set(cuts)) <= count:
        raise InputError(
            f"{path} has no {count} parts of about the same size: choose fewer devices, or more memory for each."
        )
    partitions: list[GraphPartition] = []
    outgoing: list[str] = []
    for start, end in reversed(list(itertools.pairwise(cuts))):
        last = not partitions
        part, incoming = _extract(model.clone(), start, end, [] if last else outgoing)
        outgoing = list(dict.fromkeys([*outgoing, *incoming]))
        weights = part.graph.initializers
        size = sum(value.const_value.nbytes for value in weights.values() if value.const_value is not None)
        partitions.insert(0, GraphPartition(serialize_over_data(part, path.parent), frozenset(weights), size))
    return partitions


def _is_transferred(value: ir.Value) -> bool:
    """Return whether a value is transferred between devices; integers and constants are recomputed."""
    producer = value.producer()
    floating = value.dtype is not None and value.dtype.is_floating_point()
    return floating and producer is not None and producer.op_type != "Constant"


def _choose_cuts(graph: ir.Graph, count: int) -> list[int]:
    """Return the index of the first node of each partition, and the number of nodes."""
    nodes = list(graph)
    position = {node: index for index, node in enumerate(nodes)}
    sizes, seen = [0] * len(nodes), set()
    transferred = [0] * (len(nodes) + 1)  # number of values that a cut before node i transfers
    for index, node in enumerate(nodes):
        for value in all_inputs(node):
            if value.is_initializer() and value not in seen and value.const_value is not None:
                seen.add(value)
                sizes[index] += value.const_value.nbytes
        for value in node.outputs:
            last = max((position.get(consumer, index) for consumer, _ in value.uses()), default=index)
            for cut in range(index + 1, last + 1) if _is_transferred(value) else ():
                transferred[cut] += 1
    before = [0]
    for size in sizes:
        before.append(before[-1] + size)
    cuts = [0]
    for index in range(1, count):
        balanced, slack = before[-1] * index / count, before[-1] * min(MAX_IMBALANCE, MAX_PART_IMBALANCE / count)
        near = [i for i in range(1, len(nodes)) if abs(before[i] - balanced) <= slack]
        near = near or [min(range(1, len(nodes)), key=lambda i: abs(before[i] - balanced))]
        cuts.append(min(near, key=lambda i: (transferred[i], abs(before[i] - balanced))))
    return [*cuts, len(nodes)]


def _extract(model: ir.Model, start: int, end: int, outgoing: Sequence[str]) -> tuple[ir.Model, list[str]]:
    """Reduce a copy of the graph to the nodes `start` to `end` and the nodes that are recomputed for them.

    `outgoing`: names of values that later partitions use; [] for the last partition, which has the graph's outputs.
    Returns the model, and the names of the values from earlier partitions.
    """
    graph = model.graph
    nodes = list(graph)
    position = {node: index for index, node in enumerate(nodes)}
    incoming: dict[ir.Value, None] = {}
    stack = [value for node in nodes[start:end] for value in all_inputs(node)]
    recomputed: set[ir.Node] = set()
    while stack:
        value = stack.pop()
        producer = value.producer()
        if producer is None or position.get(producer, start) >= start:
            continue
        if _is_transferred(value):
            incoming[value] = None
        elif producer not in recomputed:
            recomputed.add(producer)
            stack += all_inputs(producer)
    names = [str(value.name) for value in incoming]
    outputs = [value for node in nodes[start:end] for value in node.outputs if value.name in set(outgoing)]
    outputs = outputs if outgoing else list(graph.outputs)
    cut_subgraph(model, list(incoming), outputs)
    return model, names
