"""Tidying between two rewrites: what nobody reads goes, and the nodes are in order again.

One walk each, as cheap as a walk is: this runs after every pass that rewrote something.
"""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common


def tidy(model: ir.Model) -> None:
    """Drop Identity nodes, unread nodes and unread weights; sort the nodes where one stands behind its reader."""
    if any(node.op_type == "Identity" for node in model.graph):
        common.IdentityEliminationPass()(model)
    drop_unread(model.graph)
    if not _in_order(model.graph):
        common.TopologicalSortPass()(model)


def drop_unread(graph: ir.Graph) -> None:
    """Drop the nodes and weights of a graph that nothing reads."""
    for node in reversed(graph):
        if not any(output.uses() or output.is_graph_output() for output in node.outputs):
            graph.remove(node, safe=True)
    for value in list(graph.initializers.values()):
        if not (value.uses() or value.is_graph_input() or value.is_graph_output()):
            assert value.name is not None
            del graph.initializers[value.name]


def operators(graph: ir.Graph) -> set[str]:
    """The operators of a graph and of those inside it."""
    found = set()
    for node in graph:
        found.add(node.op_type)
        for inner in _inside(node):
            found |= operators(inner)
    return found


def _inside(node: ir.Node) -> list[ir.Graph]:
    graphs = [each for each in node.attributes.values() if each.type == ir.AttributeType.GRAPH]
    return [each.as_graph() for each in graphs]


def _in_order(graph: ir.Graph) -> bool:
    seen: set[ir.Node] = set()
    for node in graph:
        for value in node.inputs:
            source = None if value is None else value.producer()
            if source is not None and source not in seen and source.graph is graph:
                return False
        if _inside(node):
            return False  # what bodies read is not looked at here: sorting finds it
        seen.add(node)
    return True
