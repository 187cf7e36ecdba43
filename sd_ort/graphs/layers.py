"""Layers of the checkpoint in a graph, exported or fused, found by the weight recipes of its initializers."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

import onnx_ir as ir

from fusion_passes import weight_recipes
from fusion_passes.weight_recipes import WeightRecipe


def initializers_by_source(graph: ir.Graph, recipes: Mapping[str, WeightRecipe]) -> dict[str, list[ir.Value]]:
    """Return the initializers that are computed from each tensor of the checkpoint. `recipes`: of the initializers."""
    by_source: dict[str, list[ir.Value]] = {}
    for name in graph.initializers.keys() & recipes.keys():
        for source in weight_recipes.sources(recipes[name]):
            by_source.setdefault(source, []).append(graph.initializers[name])
    return by_source


def only_consumer(
    initializers: Iterable[ir.Value], forwarding_ops: Container[str], input_index: int | None = None
) -> ir.Node | None:
    """Return the node that consumes initializers, also behind nodes of `forwarding_ops`; None if there is not one.

    input_index: the input of the node that the initializer must be; None for any.
    """
    values, consumers = [*initializers], dict[ir.Node, None]()
    for value in values:  # the list grows
        for node, index in value.uses():
            if node.op_type in forwarding_ops:
                values.append(node.outputs[0])
            elif input_index in (None, index):
                consumers[node] = None
    return next(iter(consumers)) if len(consumers) == 1 else None
