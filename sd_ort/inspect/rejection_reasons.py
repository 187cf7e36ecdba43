"""Reasons why an operator was not fused: near misses of the passes, ranked, or what its graph shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import onnx_ir as ir

from fusion_passes import value_queries as c
from fusion_passes.graph_pass import PassOutcome

MAX_DISTANCE = 8  # nodes from an unfused operator to the root of a rejected match
MAX_UPSTREAM = 64  # nodes of the search for the first value of unknown shape


def near_misses(node: ir.Node, outcomes: Mapping[str, PassOutcome], fusion: str) -> list[dict[str, Any]]:
    """Return the rejected matches around a node: first those of `fusion`, which usually takes it, then by distance.

    An entry has: pass, reason, op and value (of the match's root node), unknown_value (description, or None), distance
    (in nodes, from the node to the root).
    """
    distances = _downstream(node)
    matches = [
        (name != fusion, distances[rejection.node], name, rejection)
        for name, outcome in outcomes.items()
        for rejection in outcome.rejections
        if rejection.node in distances
    ]
    matches.sort(key=lambda match: match[:3])
    entries = [
        {
            "pass": name,
            "reason": rejection.reason,
            "op": rejection.node.op_type,
            "value": rejection.node.outputs[0].name,
            "unknown_value": None if rejection.value is None else describe_unknown(rejection.value),
            "distance": distance,
        }
        for _, distance, name, rejection in matches
    ]
    return [entry for i, entry in enumerate(entries) if entry not in entries[:i]]


def default_reason(node: ir.Node, usual_reason: str) -> str:
    """Return why no rule matched a node: what its neighbors show, else the usual reason for its operator."""
    consumers = sorted({_op_name(consumer) for consumer in _consumers(node)})
    producer = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
    if node.op_type == "Gelu" and "Mul" not in consumers:
        return f"no gate: it is read by {' and '.join(consumers) or 'nothing'}, and is no factor of a product"
    if node.op_type == "LayerNormalization" and producer is not None and producer.op_type == "Add":
        if len(node.inputs) < 3 or node.inputs[2] is None:
            return "it has no beta, and only normalizations with gamma and beta are fused with their sum"
        return "nothing but a sum of two feature maps, and a normalization of it, is fused"
    return usual_reason


def unknown_inputs(node: ir.Node) -> str | None:
    """Describe the first input of unknown shape, or return None if all shapes are known."""
    unknown = [value for value in node.inputs if value is not None and value.shape is None]
    return describe_unknown(unknown[0]) if unknown else None


def describe_unknown(value: ir.Value) -> str:
    """Describe what is unknown about a value, and after which node: "the shape of X is unknown behind Tile"."""
    if value.shape is None and value.const_value is None:
        first = _first_unknown(value)
        producer = first.producer()
        return f"the shape of {first.name} is unknown" + ("" if producer is None else f" behind {_op_name(producer)}")
    producer = value.producer()
    sizes = "scalar" if not c.dims(value) else " x ".join(map(str, c.dims(value) or []))
    if value.const_value is not None:
        return f"{value.name} is a constant, {sizes}"
    return f"{value.name} ({sizes}) is " + ("an input" if producer is None else f"made by {_op_name(producer)}")


def _first_unknown(value: ir.Value) -> ir.Value:
    """Return the first value upstream of unknown shape: the shapes of its node's inputs are known."""
    for _ in range(MAX_UPSTREAM):
        producer = value.producer()
        unknown = [] if producer is None else [v for v in producer.inputs if v is not None and v.shape is None]
        if not unknown:
            break
        value = unknown[0]
    return value


def _op_name(node: ir.Node) -> str:
    return f"{node.domain}.{node.op_type}" if node.domain else node.op_type


def _downstream(node: ir.Node) -> dict[ir.Node, int]:
    """Return `node` and the nodes that depend on it, with their distances up to MAX_DISTANCE."""
    distances, frontier = {node: 0}, [node]
    for distance in range(1, MAX_DISTANCE + 1):
        frontier = [consumer for n in frontier for consumer in _consumers(n) if consumer not in distances]
        distances.update(dict.fromkeys(frontier, distance))
    return distances


def _consumers(node: ir.Node) -> Iterator[ir.Node]:
    return (consumer for output in node.outputs for consumer, _ in output.uses())
