"""Cleanup after a rewrite: removes Identity nodes, dead nodes and unused weights, and sorts the graph.

Each function walks the graph once, because cleanup runs after every pass that rewrote something.
"""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common


def clean_up(model: ir.Model) -> None:
    """Remove Identity nodes, dead nodes and unused weights; sort the nodes if one precedes its producer."""
    remove_identities(model.graph)
    remove_unused(model.graph)
    if not _is_sorted(model.graph):
        common.TopologicalSortPass()(model)


def remove_identities(graph: ir.Graph) -> None:
    """Remove the Identity nodes of `graph` and its subgraphs.

    An Identity stays where it gives a graph output its own value: the input belongs to another graph, is a graph input
    or an initializer, or is an output itself. (onnx_ir's pass renames a value of the outer graph in that case.)
    """
    for node in graph:
        for body in subgraphs(node):
            remove_identities(body)
        if node.op_type != "Identity" or node.domain or node.inputs[0] is None:
            continue
        x, y = node.inputs[0], node.outputs[0]
        if y.is_graph_output():
            producer = x.producer()
            if producer is None or producer.graph is not graph or x.is_graph_output():
                continue
            name, y.name = y.name, None
            x.name = name
        x.shape, x.type = x.shape or y.shape, x.type or y.type
        ir.convenience.replace_all_uses_with(y, x, replace_graph_outputs=True)
        graph.remove(node, safe=True)


def remove_unused(graph: ir.Graph) -> None:
    """Remove the nodes and weights of `graph` that have no consumers."""
    for node in reversed(graph):
        if not any(output.uses() or output.is_graph_output() for output in node.outputs):
            graph.remove(node, safe=True)
    for value in list(graph.initializers.values()):
        if not (value.uses() or value.is_graph_input() or value.is_graph_output()):
            assert value.name is not None
            del graph.initializers[value.name]


def op_types(graph: ir.Graph) -> set[str]:
    """Return the operator types of `graph` and of its subgraphs."""
    return {node.op_type for node in graph.all_nodes()}


def subgraphs(node: ir.Node) -> list[ir.Graph]:
    """Return the graphs in a node's attributes: the branches of an If, the body of a Loop or Scan."""
    graphs: list[ir.Graph] = []
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            graphs.append(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            graphs += attribute.as_graphs()
    return graphs


def _is_sorted(graph: ir.Graph) -> bool:
    seen: set[ir.Node] = set()
    for node in graph:
        for value in node.inputs:
            source = None if value is None else value.producer()
            if source is not None and source not in seen and source.graph is graph:
                return False
        if subgraphs(node):
            return False  # subgraphs also use outer values; TopologicalSortPass considers those
        seen.add(node)
    return True
