"""Lets the operator that computes an activation write it in float8, in place of a QuantizeLinear after it.

    QuantizeLinear(Y, s)            =>  output `quantized` of the node of Y, with attribute quantized_scale = s
    QuantizeLinear(Reshape(Y), s)   =>  Reshape(quantized)

Y stays the node's output for its other consumers; without any, kernels do not write it. Rejected: operators without
such an output, or another output than Y; scales that are no constant number; zero points; other element types; a
second scale of the same Y; a product with other consumers, of which kernels write one form.
Runs after `quantized_linear`.
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes import DOMAIN
from fusion_passes import value_queries as values
from fusion_passes.cleanup import remove_unused
from fusion_passes.graph_pass import PassOutcome, Rejection
from fusion_passes.operators import BY_NAME
from fusion_passes.operators.definition import QUANTIZED_SCALE


def float8_outputs(model: ir.Model) -> PassOutcome:
    """Rewrite the QuantizeLinear nodes of `model` in place; count them."""
    outcome, graph = PassOutcome(), model.graph
    for node in list(graph):
        if node.op_type != "QuantizeLinear" or node.domain:
            continue
        y, reshapes = _before_reshapes(node.inputs[0])
        if reason := _reject_reason(node, y, reshapes):
            outcome.rejections.append(Rejection(node, reason))
            continue
        assert y is not None
        _rewrite(graph, node, y, reshapes)
        outcome.counts["float8_output"] += 1
    remove_unused(graph)
    return outcome


def _before_reshapes(value: ir.Value | None) -> tuple[ir.Value | None, list[ir.Node]]:
    """Return the source of a chain of Reshape nodes that ends in `value`, and these nodes, the last one first."""
    reshapes: list[ir.Node] = []
    while value is not None and (producer := value.producer()) is not None and producer.op_type == "Reshape":
        reshapes.append(producer)
        value = producer.inputs[0]
    return value, reshapes


def _reject_reason(node: ir.Node, y: ir.Value | None, reshapes: list[ir.Node]) -> str | None:
    scale = values.scalar(node.inputs[1])
    if scale is None:
        return "its scale is not a constant number"
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        return "it has a zero point"
    if node.attributes.get_int("output_dtype", 0) != ir.DataType.FLOAT8E4M3FN:
        return "its elements are not float8e4m3fn"
    producer = None if y is None else y.producer()
    operator = None if producer is None or producer.domain != DOMAIN else BY_NAME.get(producer.op_type)
    if y is None or producer is None or operator is None or operator.float8_output is None:
        return "its input is not computed by an operator with an output in float8"
    if y is not producer.outputs[0]:
        return "its input is another output than the first one"
    if producer.attributes.get_float(QUANTIZED_SCALE, scale) != scale:
        return "its input is quantized by another scale as well"
    if producer.op_type == "QuantizedLinear" and not all(
        map(values.has_one_use, (y, *(each.outputs[0] for each in reshapes)))
    ):
        return "its input is a product with other consumers, of which kernels write one form"
    return None


def _rewrite(graph: ir.Graph, node: ir.Node, y: ir.Value, reshapes: list[ir.Node]) -> None:
    """Replace a QuantizeLinear by an output of the node of `y`, followed by copies of `reshapes`."""
    producer, before = values.producer(y), node.outputs[0]
    index = BY_NAME[producer.op_type].float8_output
    assert index is not None
    scale = values.scalar(node.inputs[1])
    assert scale is not None
    if QUANTIZED_SCALE not in producer.attributes:
        first = len(producer.outputs)
        producer.resize_outputs(index + 1)
        for output in producer.outputs[first:]:
            output.name, output.type, output.shape = f"{y.name}.output{output.index()}", y.type, y.shape
        producer.outputs[index].type = before.type
        producer.attributes[QUANTIZED_SCALE] = ir.AttrFloat32(QUANTIZED_SCALE, scale)
    quantized = producer.outputs[index]
    for reshape in reversed(reshapes):
        attributes = {name: attribute.value for name, attribute in reshape.attributes.items()}
        copy = ir.node("Reshape", [quantized, reshape.inputs[1]], attributes)
        quantized = copy.outputs[0]
        quantized.name = f"{reshape.outputs[0].name}.float8"
        quantized.type, quantized.shape = before.type, reshape.outputs[0].shape
        graph.insert_before(node, copy)
    ir.convenience.replace_all_uses_with(before, quantized, replace_graph_outputs=True)
    graph.remove(node, safe=True)
