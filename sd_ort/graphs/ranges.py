"""A graph as consecutive ranges of its nodes, for devices of which none holds all of its weights.

The cuts lie where the ranges' weights are about as large as each other, and of those places where the fewest values are
handed on: behind a U-Net's middle that is its skip connections. What is handed on is floating-point numbers alone. A
shape, or another integer that is computed on the host, is computed again in each range that reads it, so that no range
copies anything between host and device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
import onnx_ir.passes.common as common

from fusion_passes.shapes.infer import annotate
from sd_ort.core.errors import InputError
from sd_ort.graphs.hoist import like, reads
from sd_ort.graphs.load import load, over_data

UNEVEN = 0.05  # of all weights: so far from even a cut may lie, for fewer values to be handed on


@dataclass(frozen=True)
class Range:
    """A part of a graph over the whole graph's data file. `weights`: the names of its initializers; `bytes`: theirs."""

    graph: bytes
    weights: frozenset[str]
    bytes: int


def ranges(path: Path, count: int) -> list[Range]:
    """The graph at `path` as `count` ranges: each reads inputs of the graph and what those before it give.

    Raises InputError for a graph with fewer places to cut.
    """
    model = load(path)
    annotate(model.graph)
    places = _places(model.graph, count)
    if len(set(places)) <= count:
        raise InputError(f"{path} has no {count} parts of about the same size: spread it over fewer devices.")
    made: list[Range] = []
    outgoing: list[str] = []
    for start, end in reversed(list(itertools.pairwise(places))):
        last = not made
        part, incoming = _range(model.clone(), start, end, [] if last else outgoing)
        outgoing = list(dict.fromkeys([*outgoing, *incoming]))
        weights = part.graph.initializers
        size = sum(value.const_value.nbytes for value in weights.values() if value.const_value is not None)
        made.insert(0, Range(over_data(part, path.parent), frozenset(weights), size))
    return made


def _is_number(value: ir.Value) -> bool:
    """Whether a value lies on the device: integers and constants can be made anywhere."""
    producer = value.producer()
    floating = value.dtype is not None and value.dtype.is_floating_point()
    return floating and producer is not None and producer.op_type != "Constant"


def _places(graph: ir.Graph, count: int) -> list[int]:
    """Where the ranges begin, and the number of nodes."""
    nodes = list(graph)
    position = {node: index for index, node in enumerate(nodes)}
    sizes, seen = [0] * len(nodes), set()
    handed = [0] * (len(nodes) + 1)  # floating-point values that a cut before node i would hand on
    for index, node in enumerate(nodes):
        for value in reads(node):
            if value.is_initializer() and value not in seen and value.const_value is not None:
                seen.add(value)
                sizes[index] += value.const_value.nbytes
        for value in node.outputs:
            last = max((position.get(user, index) for user, _ in value.uses()), default=index)
            for cut in range(index + 1, last + 1) if _is_number(value) else ():
                handed[cut] += 1
    before = [0]
    for size in sizes:
        before.append(before[-1] + size)
    places = [0]
    for number in range(1, count):
        even, slack = before[-1] * number / count, before[-1] * UNEVEN
        near = [i for i in range(1, len(nodes)) if abs(before[i] - even) <= slack]
        near = near or [min(range(1, len(nodes)), key=lambda i: abs(before[i] - even))]
        places.append(min(near, key=lambda i: (handed[i], abs(before[i] - even))))
    return [*places, len(nodes)]


def _range(model: ir.Model, start: int, end: int, wanted: Sequence[str]) -> tuple[ir.Model, list[str]]:
    """Reduce a copy of the graph to nodes `start` to `end`, and what is computed again for them. `wanted`: names of
    values that later ranges read; [] for the last range, which gives the graph's outputs. Also returns the names of the
    values that it reads of earlier ones."""
    graph = model.graph
    nodes = list(graph)
    position = {node: index for index, node in enumerate(nodes)}
    incoming: dict[ir.Value, None] = {}
    stack = [value for node in nodes[start:end] for value in reads(node)]
    again: set[ir.Node] = set()
    while stack:
        value = stack.pop()
        producer = value.producer()
        if producer is None or position.get(producer, start) >= start:
            continue
        if _is_number(value):
            incoming[value] = None
        elif producer not in again:
            again.add(producer)
            stack += reads(producer)
    names = [str(value.name) for value in incoming]
    outputs = [value for node in nodes[start:end] for value in node.outputs if value.name in set(wanted)]
    outputs = outputs if wanted else list(graph.outputs)
    for value in incoming:
        new = like(value)
        ir.convenience.replace_all_uses_with(value, new)
        value.name = f"{value.name}.elsewhere"
        graph.inputs.append(new)
    graph.outputs.clear()
    graph.outputs.extend(outputs)
    common.RemoveUnusedNodesPass()(model)
    common.RemoveUnusedFunctionsPass()(model)
    for value in [v for v in graph.inputs if not v.uses() and not v.is_graph_output()]:
        graph.inputs.remove(value)
    return model, names
