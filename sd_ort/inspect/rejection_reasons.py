"""Why a site was left: the near misses of the passes, ranked, and the node and value where the proof ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import onnx_ir as ir

from fusion_passes import value_queries as c
from fusion_passes.graph_pass import PassOutcome

REACH = 8  # nodes between what is left and the end of the match that refused it
FAR = 64  # nodes that are looked at before what a value is unknown behind is given up


def near_misses(node: ir.Node, refused: Mapping[str, PassOutcome], fusion: str) -> list[dict[str, Any]]:
    """The matches refused around a node, best first: those of the fusion that usually takes it, then near ones.

    An entry has: pass, reason, op and value (the node at the end of the match, and its result), ended (where the proof
    came to its end, or None), distance (in nodes, from the site to the end of the match).
    """
    distances = _downstream(node)
    found = [
        (name != fusion, distances[refusal.node], name, refusal)
        for name, outcome in refused.items()
        for refusal in outcome.rejections
        if refusal.node in distances
    ]
    found.sort(key=lambda each: each[:3])
    entries = [
        {
            "pass": name,
            "reason": refusal.reason,
            "op": refusal.node.op_type,
            "value": refusal.node.outputs[0].name,
            "ended": None if refusal.value is None else ended(refusal.value),
            "distance": distance,
        }
        for _, distance, name, refusal in found
    ]
    return [entry for i, entry in enumerate(entries) if entry not in entries[:i]]


def usual(node: ir.Node, otherwise: str) -> str:
    """Why no rule matched a node at all: what can be seen at it, else `otherwise`, which is true of its operator."""
    readers = sorted({_called(reader) for reader in _readers(node)})
    maker = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
    if node.op_type == "Gelu" and "Mul" not in readers:
        return f"no gate: it is read by {' and '.join(readers) or 'nothing'}, and is no factor of a product"
    if node.op_type == "LayerNormalization" and maker is not None and maker.op_type == "Add":
        if len(node.inputs) < 3 or node.inputs[2] is None:
            return "it has no beta, and only normalizations with gamma and beta are fused with their sum"
        return "nothing but a sum of two feature maps, and a normalization of it, is fused"
    return otherwise


def unknown_inputs(node: ir.Node) -> str | None:
    """Where the shape of an input of a node was lost, or None where all are known."""
    lost = [value for value in node.inputs if value is not None and value.shape is None]
    return ended(lost[0]) if lost else None


def ended(value: ir.Value) -> str:
    """What is not known of a value, and behind which node: "the shape of X is unknown behind Tile"."""
    if value.shape is None and value.const_value is None:
        first = _first_unknown(value)
        maker = first.producer()
        return f"the shape of {first.name} is unknown" + ("" if maker is None else f" behind {_called(maker)}")
    maker = value.producer()
    sizes = "scalar" if not c.dims(value) else " x ".join(map(str, c.dims(value) or []))
    if value.const_value is not None:
        return f"{value.name} is a constant, {sizes}"
    return f"{value.name} ({sizes}) is " + ("an input" if maker is None else f"made by {_called(maker)}")


def _first_unknown(value: ir.Value) -> ir.Value:
    """The value upstream at which knowledge of shapes ends: all that its node reads is known."""
    for _ in range(FAR):
        maker = value.producer()
        behind = [] if maker is None else [v for v in maker.inputs if v is not None and v.shape is None]
        if not behind:
            break
        value = behind[0]
    return value


def _called(node: ir.Node) -> str:
    return f"{node.domain}.{node.op_type}" if node.domain else node.op_type


def _downstream(node: ir.Node) -> dict[ir.Node, int]:
    """`node` and what reads it, directly or through up to `REACH` nodes, with the distance."""
    found, frontier = {node: 0}, [node]
    for distance in range(1, REACH + 1):
        frontier = [user for each in frontier for user in _readers(each) if user not in found]
        found.update(dict.fromkeys(frontier, distance))
    return found


def _readers(node: ir.Node) -> Iterator[ir.Node]:
    return (user for output in node.outputs for user, _ in output.uses())
