"""Inlining of one ONNX model's graph into another, to join the parts of a hoisted UNet or the graphs of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from sd_ort.core.errors import InputError

# ONNX opsets 22 and 23 added operators and dtypes but changed no operator of opset 21 (ONNX's changelog of operators).
UNCHANGED_SINCE = 21


def inline(
    model: ir.Model, source: ir.Model, inputs: Mapping[str, ir.Value], prefix: str, into: ir.Graph | None = None
) -> dict[str, ir.Value]:
    """Append the nodes of `source` to `into` and return the outputs of `source` by name.

    Args:
        inputs: for each input of `source` a value of `into` or of an outer graph.
        prefix: prefix of the names of nodes, values and weights.
        into: `model.graph` by default, or a subgraph of it.

    `source` is consumed. Its weights stay in their files. The model's opset becomes the higher one of the two.

    Raises:
        InputError: if the higher opset could change the definition of a node's operator.
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
    for node in graph.all_nodes():
        _rename(node, prefix)
    nodes = list(graph)
    graph.remove(nodes)
    target.extend(nodes)
    return dict(zip(names, outputs, strict=True))


def _rename(node: ir.Node, prefix: str) -> None:
    """Prefix the names of a node, its outputs and their symbolic sizes.

    A symbolic size such as "batch" may be another size in the target model.
    """
    if node.name:
        node.name = prefix + node.name
    for output in node.outputs:
        if output.name:
            output.name = prefix + output.name
        if output.shape is not None:
            sizes = [size if isinstance(size, int) else size.value for size in output.shape]
            output.shape = ir.Shape([prefix + size if isinstance(size, str) else size for size in sizes])


def _import_opsets(graph: ir.Graph, source: ir.Model) -> None:
    """Set the opset of each domain to the higher one of the two graphs, if no definition changes between them."""
    for domain, version in source.graph.opset_imports.items():
        low, high = sorted((graph.opset_imports.get(domain, version), version))
        if low != high and (domain or low < UNCHANGED_SINCE):
            raise InputError(f"the components have opsets {low} and {high}: optimize the whole folder again.")
        graph.opset_imports[domain] = high


def _import_functions(model: ir.Model, source: ir.Model, prefix: str) -> None:
    """Add the functions of `source` to `model`; a function whose name has another body becomes an overload."""
    renamed: dict[ir.OperatorIdentifier, str] = {}
    for key, function in list(source.functions.items()):
        existing = model.functions.get(key)
        if existing is not None and _serialize(existing) != _serialize(function):
            function.overload = renamed[key] = prefix.rstrip(".") + function.overload
        model.functions[function.identifier()] = function
    if renamed:
        for node in source.graph.all_nodes():
            if node.op_identifier() in renamed:
                node.overload = renamed[node.op_identifier()]


def _serialize(function: ir.Function) -> bytes:
    return ir.to_proto(function).SerializeToString(deterministic=True)
