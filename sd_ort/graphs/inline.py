"""Put one ONNX model's graph into another: so the parts of a hoisted UNet, or of a pipeline, become one model."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from sd_ort.core.errors import InputError

# ONNX opsets 22 and 23 brought new operators, and new element types to old ones; nothing that a graph of 21 holds
# changed its meaning (ONNX's changelog of operators).
UNCHANGED_SINCE = 21


def inline(
    model: ir.Model, source: ir.Model, inputs: Mapping[str, ir.Value], prefix: str, into: ir.Graph | None = None
) -> dict[str, ir.Value]:
    """Append the nodes of `source` to `into` (`model`'s graph, or a graph inside it) and return its outputs by name.

    `inputs`: a value of the receiving graph, or of one around it, for every input of `source`. `prefix` goes before
    the names of nodes, values and weights. `source` is used up; its weights stay where they are on disk.
    The model's opset becomes the higher of the two. Raises InputError when that could change what a node means.
    """
    target = model.graph if into is None else into
    _import_opsets(model.graph, source)
    _import_functions(model, source, prefix)
    graph = source.graph
    outputs = list(graph.outputs)
    names = [str(value.name) for value in outputs]
    for value in list(graph.inputs):
        ir.convenience.replace_all_uses_with(value, inputs[str(value.name)])
        outputs = [inputs[str(value.name)] if v is value else v for v in outputs]
    graph.inputs.clear()
    graph.outputs.clear()
    for name in list(graph.initializers):
        value = graph.initializers.pop(name)
        value.name = prefix + name
        target.register_initializer(value)
    nodes = list(graph)
    graph.remove(nodes)
    for node in nodes:
        _rename(node, prefix)
    target.extend(nodes)
    return dict(zip(names, outputs, strict=True))


def _rename(node: ir.Node, prefix: str) -> None:
    """Prefix the names of a node, its results and their symbolic sizes, those inside its subgraphs included.

    One name of a size, such as "batch", may mean another size in the model that the node goes to.
    """
    if node.name:
        node.name = prefix + node.name
    for output in node.outputs:
        if output.name:
            output.name = prefix + output.name
        if output.shape is not None:
            sizes = [size if isinstance(size, int) else size.value for size in output.shape]
            output.shape = ir.Shape([prefix + size if isinstance(size, str) else size for size in sizes])
    for graph in subgraphs(node):
        for inner in graph:
            _rename(inner, prefix)


def subgraphs(node: ir.Node) -> list[ir.Graph]:
    """The graphs that a node runs: branches of an If, the body of a Loop."""
    found: list[ir.Graph] = []
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            found.append(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            found += attribute.as_graphs()
    return found


def _import_opsets(graph: ir.Graph, source: ir.Model) -> None:
    """Take the higher opset of the two, where that changes nothing."""
    for domain, version in source.graph.opset_imports.items():
        low, high = sorted((graph.opset_imports.get(domain, version), version))
        if low != high and (domain or low < UNCHANGED_SINCE):
            raise InputError(f"the components are of opsets {low} and {high}: optimize the whole folder again.")
        graph.opset_imports[domain] = high


def _import_functions(model: ir.Model, source: ir.Model, prefix: str) -> None:
    """Add `source`'s functions; one whose name is taken by another body becomes an overload of its own."""
    renamed: dict[ir.OperatorIdentifier, str] = {}
    for key, function in list(source.functions.items()):
        there = model.functions.get(key)
        if there is not None and _text(there) != _text(function):
            function.overload = renamed[key] = prefix.rstrip(".") + function.overload
        model.functions[function.identifier()] = function
    if renamed:
        for node in source.graph.all_nodes():
            if node.op_identifier() in renamed:
                node.overload = renamed[node.op_identifier()]


def _text(function: ir.Function) -> bytes:
    return ir.to_proto(function).SerializeToString(deterministic=True)
