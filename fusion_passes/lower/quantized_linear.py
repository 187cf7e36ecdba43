"""Lowers linear layers between QDQ to QuantizedLinear, which reads 8-bit elements and scales its sums.

    x = DequantizeLinear(q, s), w = DequantizeLinear(e, t)     s a number, t a number or one a column
    MatMul(x, w)                                  =>  QuantizedLinear(q, e^T, s t, 0)
    LinearAdd(x, w, b?, skip?; gelu)              =>  QuantizedLinear(q, e^T, s t, b or 0, skip; gelu)
    LinearSplitGelu(x, w, b)                      =>  QuantizedLinear(q, e^T, s t, b; gated)
    BiasSplitGelu(MatMul or LinearAdd (x, w), b)  =>  QuantizedLinear(q, e^T, s t, b; gated)

Rejected: operands that are not dequantized, or not to float32; weights that are not constant matrices; zero points;
scales along another axis. Runs after QDQ was inserted (`eight_bits.qdq`), before the conversion to half precision.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import onnx_ir as ir

from fusion_passes import DOMAIN
from fusion_passes import value_queries as values
from fusion_passes.cleanup import remove_unused
from fusion_passes.graph_edits import new_derived_initializer, new_initializer, replace_nodes, unique_name
from fusion_passes.graph_pass import PassOutcome, rewrite_nodes

LINEARS = ("MatMul", "LinearAdd", "LinearSplitGelu")


def quantized_linear(model: ir.Model) -> PassOutcome:
    """Rewrite the linear layers of `model` in place; count them. Layers without a dequantized input are no matches."""
    return lower_quantized(model, "quantized_linear", LINEARS, lambda node: reject_reason(node, 2, 1), _rewrite)


def lower_quantized(
    model: ir.Model,
    name: str,
    op_types: Collection[str],
    reject: Callable[[ir.Node], str | None],
    rewrite: Callable[[ir.Graph, ir.Node], None],
) -> PassOutcome:
    """Lower the layers of `op_types` with a dequantized input, like `rewrite_nodes`, and remove unused nodes."""

    def is_candidate(node: ir.Node) -> bool:
        return node.op_type in op_types and node.domain in ("", DOMAIN) and any(map(dequantize, node.inputs[:2]))

    outcome = rewrite_nodes(model, name, is_candidate, reject, rewrite)
    remove_unused(model.graph)
    return outcome


def dequantize(value: ir.Value | None) -> ir.Node | None:
    """Return the DequantizeLinear that computes a value, or None."""
    producer = None if value is None else value.producer()
    return producer if producer is not None and producer.op_type == "DequantizeLinear" else None


def reject_reason(node: ir.Node, rank: int, axis: int) -> str | None:
    """Return why the operands of a layer cannot be read in 8 bits, or None.

    rank: number of axes of its weight. axis: that of the output channels, which may have scales.
    """
    x, weight = (dequantize(value) for value in node.inputs[:2])
    if x is None or weight is None:
        return "one of its operands is not dequantized"
    if any(len(each.inputs) > 2 and each.inputs[2] is not None for each in (x, weight)):
        return "it has a zero point"
    if not values.is_constant(weight.inputs[0]) or values.rank(weight.inputs[0]) != rank:
        return f"its weight is not a constant of {rank} axes"
    if not values.is_constant(x.inputs[1]) or not values.is_constant(weight.inputs[1]):
        return "a scale is not constant"
    if values.scalar(x.inputs[1]) is None:
        return "its activations have more than one scale"
    if values.rank(weight.inputs[1]) == 1 and weight.attributes.get_int("axis", 1) not in (axis, axis - rank):
        return "the scales of its weight are not those of the output channels"
    if any(each.inputs[1] is None or each.inputs[1].dtype != ir.DataType.FLOAT for each in (x, weight)):
        return "it is not in float32"
    return None


def _rewrite(graph: ir.Graph, node: ir.Node) -> None:
    quantized, elements = quantized_operands(node)
    inner, columns = values.static_size(elements, 0), values.static_size(elements, 1)
    last, bias = node, node.inputs[2] if len(node.inputs) > 2 else None
    skip = node.inputs[3] if len(node.inputs) > 3 else None
    gelu, gated = node.attributes.get_int("gelu", 0), node.op_type == "LinearSplitGelu"
    if (gate := only_consumer(node, "BiasSplitGelu")) is not None and bias is None and skip is None and not gelu:
        last, bias, gated = gate, gate.inputs[1], True
    output = last.outputs[0]
    if bias is None:
        bias = zero_bias(graph, output, columns)
    rows = new_derived_initializer(
        graph, unique_name(output, "rows"), [elements], [columns, inner], "transpose", [1, 0]
    )
    inputs = [quantized, rows, scale_of_sums(graph, node, output, columns), bias, *([] if skip is None else [skip])]
    new = ir.node("QuantizedLinear", inputs, {"gelu": int(bool(gelu)), "gated": int(gated)}, domain=DOMAIN)
    replace_nodes(graph, new, node, last, node)


def quantized_operands(node: ir.Node) -> tuple[ir.Value, ir.Value]:
    """Return the elements of the activations and of the weight of a layer that is not rejected."""
    x, weight = (dequantize(value) for value in node.inputs[:2])
    assert x is not None
    assert weight is not None
    assert x.inputs[0] is not None
    assert weight.inputs[0] is not None
    return x.inputs[0], weight.inputs[0]


def scale_of_sums(graph: ir.Graph, node: ir.Node, output: ir.Value, channels: int) -> ir.Value:
    """Return a new initializer, the scale of a layer's activations times the scales of its weight."""
    x, weight = (dequantize(value) for value in node.inputs[:2])
    assert x is not None
    assert weight is not None
    scales = values.operand(weight, 1)
    count = [] if values.rank(scales) == 0 else [channels]
    factor = values.scalar(x.inputs[1])
    return new_derived_initializer(graph, unique_name(output, "scale"), [scales], count, "times", factor)


def zero_bias(graph: ir.Graph, output: ir.Value, channels: int) -> ir.Value:
    """Return a new initializer for a layer without bias."""
    return new_initializer(graph, unique_name(output, "bias"), np.zeros(channels, np.float32))


def only_consumer(node: ir.Node, op_type: str) -> ir.Node | None:
    """Return the node of `op_type` whose first input alone reads the output of a node, or None."""
    output = node.outputs[0]
    if not values.has_one_use(output):
        return None
    ((consumer, index),) = output.uses()
    return consumer if consumer.op_type == op_type and index == 0 else None
