"""Lowers channels-last convolutions between QDQ to QuantizedNhwcConv, the GPU's kernel in float8.

    x = DequantizeLinear(q, s), w = DequantizeLinear(e, t)     s a number, t a number or one a filter
    NhwcConv(x, w, b?, skip?)             =>  QuantizedNhwcConv(q, e, s t, b or 0, skip)     3 x 3, pads 1, stride 1
    NhwcConv(x, w) -> BiasAdd(., b, skip) =>  QuantizedNhwcConv(q, e, s t, b, skip)

Rejected: the operands that `quantized_linear` rejects; other filters, strides, pads, dilations or groups; Relu.
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes import DOMAIN
from fusion_passes import value_queries as values
from fusion_passes.graph_edits import replace_value
from fusion_passes.graph_pass import PassOutcome
from fusion_passes.lower import quantized_linear as linear

_ATTRIBUTES = {"strides": [1, 1], "dilations": [1, 1], "pads": [1, 1, 1, 1]}


def quantized_nhwc_conv(model: ir.Model) -> PassOutcome:
    """Rewrite the convolutions of `model` in place; count them. Those without a dequantized input are no matches."""
    return linear.lower_quantized(model, "quantized_nhwc_conv", ("NhwcConv",), _reject_reason, _rewrite)


def _reject_reason(node: ir.Node) -> str | None:
    return linear.reject_reason(node, 4, 0) or kernel_reject_reason(node)


def kernel_reject_reason(node: ir.Node) -> str | None:
    """Return why the kernel does not compute a convolution, quantized or to be quantized, or None."""
    shape = values.dims(node.inputs[1])
    if node.op_type != "NhwcConv" or shape is None or list(shape[1:3]) != [3, 3]:
        return "its kernel in 8 bits has channels-last images and filters of 3x3"
    defaults = {"strides": [1, 1], "dilations": [1, 1], "pads": [0, 0, 0, 0]}
    for name, value in _ATTRIBUTES.items():
        if list(node.attributes.get_ints(name) or defaults[name]) != value:
            return f"its kernel in 8 bits has {name} of {value[0]}"
    if node.attributes.get_int("group", 1) != 1 or node.attributes.get_int("relu", 0) != 0:
        return "its kernel in 8 bits has one group and no Relu"
    return None


def _rewrite(graph: ir.Graph, node: ir.Node) -> None:
    quantized, elements = linear.quantized_operands(node)
    filters = values.size(elements, 0)
    assert filters is not None
    last, (bias, skip) = node, (*node.inputs[2:4], None, None)[:2]
    if bias is None and skip is None and (add := _image_add(node)) is not None:
        last, (_, bias, skip) = add, add.inputs
    output = last.outputs[0]
    if bias is None:
        bias = linear.zero_bias(graph, output, filters)
    scale = linear.scale_of_sums(graph, node, output, filters)
    new = ir.node(
        "QuantizedNhwcConv", [quantized, elements, scale, bias, *([] if skip is None else [skip])], domain=DOMAIN
    )
    new.metadata_props.update(node.metadata_props)
    replace_value(graph, last, new, output)
    graph.remove(last, safe=True)
    if last is not node:
        graph.remove(node, safe=True)


def _image_add(node: ir.Node) -> ir.Node | None:
    """Return the BiasAdd that alone consumes a convolution and adds a bias and an image to it, or None."""
    output = node.outputs[0]
    consumers = values.consumers(output)
    if len(consumers) != 1 or output.is_graph_output():
        return None
    (add,) = consumers
    adds_image = add.op_type == "BiasAdd" and len(add.inputs) == 3 and add.inputs[0] is output
    return add if adds_image and None not in add.inputs else None
