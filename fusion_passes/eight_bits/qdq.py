"""QuantizeLinear and DequantizeLinear around layers: the interchange form of a graph in 8 bits.

    Layer(x, w)  =>  q = QuantizeLinear(x, s)          per tensor, s a constant or computed from x
                     Layer(DequantizeLinear(q, s), DequantizeLinear(w', t))
                     w' and t: the weight in 8 bits and the scales of its output channels

Layers that read the same activations share them in 8 bits. Scales are symmetric, without zero points. A dynamic scale
is s = Max(ReduceMax(Abs(x)) / limit, smallest), where limit is the largest element of the format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from fusion_passes.eight_bits.layers import Layer
from fusion_passes.element_formats import SMALLEST_SCALE, ElementFormat
from fusion_passes.graph_edits import new_derived_initializer, new_initializer

FLOAT = ir.DataType.FLOAT


def insert_qdq(
    graph: ir.Graph,
    layers: Sequence[Layer],
    format_: ElementFormat,
    largest: Mapping[str, float] | None,
    per_channel: bool = True,
) -> None:
    """Quantize the inputs of `layers` in place.

    Args:
        largest: Magnitude of each activation, by the name of the value. None computes the scales in the graph, from
            the activations of each run.
        per_channel: Whether each output channel of a weight has its scale; else there is one for the weight.

    Raises:
        ValueError: float16 does not represent the scale of a magnitude.
    """
    activations: dict[ir.Value, ir.Value] = {}
    weights: dict[tuple[ir.Value, int], ir.Value] = {}
    for layer in layers:
        x, weight, key = layer.x, layer.weight, (layer.weight, layer.axis)
        if x not in activations:
            if largest is None:
                scale = _dynamic_scale(graph, layer.node, x, format_)
            else:
                scale = _constant_scale(graph, x, format_, largest[str(x.name)])
            activations[x] = _quantized_activation(graph, layer.node, x, format_, scale)
        if key not in weights:
            weights[key] = _quantized_weight(graph, layer, format_, layer.axis if per_channel else None)
        layer.node.replace_input_with(0, activations[x])
        layer.node.replace_input_with(1, weights[key])
        if not weight.uses() and not weight.is_graph_output():
            del graph.initializers[str(weight.name)]


def _constant_scale(graph: ir.Graph, x: ir.Value, format_: ElementFormat, largest: float) -> ir.Value:
    return new_initializer(graph, f"{x.name}.scale", np.asarray(format_.scale(largest, round_up=True), np.float32))


def _dynamic_scale(graph: ir.Graph, first: ir.Node, x: ir.Value, format_: ElementFormat) -> ir.Value:
    """Insert the nodes that compute the scale of x before `first`. `SMALLEST_SCALE` keeps that of zeros above 0."""
    limit, smallest = (
        graph.initializers.get(name) or new_initializer(graph, name, np.asarray(number, np.float32))
        for name, number in ((f"{format_.name}.limit", format_.limit), ("smallest.scale", SMALLEST_SCALE))
    )

    def add(op_type: str, suffix: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        node = ir.node(op_type, inputs, attributes)
        value = node.outputs[0]
        value.name, value.type = f"{x.name}.{suffix}", ir.TensorType(FLOAT)
        value.shape = x.shape if op_type == "Abs" else ir.Shape([])
        graph.insert_before(first, node)
        return value

    highest = add("ReduceMax", "largest", add("Abs", "magnitude", x), keepdims=0)
    return add("Max", "scale", add("Div", "exact_scale", highest, limit), smallest)


def _quantized_activation(
    graph: ir.Graph, first: ir.Node, x: ir.Value, format_: ElementFormat, scale: ir.Value
) -> ir.Value:
    """Insert both nodes before `first`, the first consumer in the graph's order."""
    onnx_type = ir.DataType.from_numpy(format_.dtype)
    quantize = ir.node("QuantizeLinear", [x, scale], {"output_dtype": int(onnx_type)})
    dequantize = ir.node("DequantizeLinear", [quantize.outputs[0], scale])
    for node, suffix, dtype in ((quantize, "quantized", onnx_type), (dequantize, "dequantized", FLOAT)):
        value = node.outputs[0]
        value.name, value.type, value.shape = f"{x.name}.{suffix}", ir.TensorType(dtype), x.shape
        graph.insert_before(first, node)
    return dequantize.outputs[0]


def _quantized_weight(graph: ir.Graph, layer: Layer, format_: ElementFormat, axis: int | None) -> ir.Value:
    weight = layer.weight
    assert weight.const_value is not None
    shape = [int(size) for size in weight.const_value.shape.numpy()]
    name = str(weight.name) if axis is None else f"{weight.name}.axis{axis}"
    count = [] if axis is None else [shape[axis]]
    scale = new_derived_initializer(graph, f"{name}.scale", [weight], count, "channel_scale", [format_.name, axis, 1.0])
    elements = new_derived_initializer(
        graph, f"{name}.{format_.name}", [weight], shape, "quantize", [format_.name, axis],
        ir.DataType.from_numpy(format_.dtype),
    )  # fmt: skip
    node = ir.node("DequantizeLinear", [elements, scale], {} if axis is None else {"axis": axis})
    value = node.outputs[0]
    value.name, value.type, value.shape = f"{name}.dequantized", ir.TensorType(FLOAT), weight.shape
    graph.insert_before(layer.node, node)
    return value
