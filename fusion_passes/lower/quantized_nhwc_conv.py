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
from fusion_passes.graph_edits import replace_nodes
from fusion_passes.graph_pass import PassOutcome
from fusion_passes.lower import quantized_linear as linear
from fusion_passes.lower.subpixel_conv import same_size_3x3_reject_reason


def quantized_nhwc_conv(model: ir.Model) -> PassOutcome:
    """Rewrite the convolutions of `model` in place; count them. Those without a dequantized input are no matches."""
    return linear.lower_quantized(model, "quantized_nhwc_conv", ("NhwcConv",), _reject_reason, _rewrite)


def _reject_reason(node: ir.Node) -> str | None:
    return linear.reject_reason(node, 4, 0) or kernel_reject_reason(node)


def kernel_reject_reason(node: ir.Node) -> str | None:
    """Return why the kernel does not compute a convolution, quantized or to be quantized, or None."""
    if node.op_type != "NhwcConv":
        return "its kernel in 8 bits reads channels-last images"
    if node.attributes.get_int("relu", 0):
        return "its kernel in 8 bits has no Relu"
    return same_size_3x3_reject_reason(node)


def _rewrite(graph: ir.Graph, node: ir.Node) -> None:
    quantized, elements = linear.quantized_operands(node)
    filters = values.static_size(elements, 0)
    last, (bias, skip) = node, (*node.inputs[2:4], None, None)[:2]
    add = linear.only_consumer(node, "BiasAdd")
    if bias is None and skip is None and add is not None and len(add.inputs) == 3:
        last, (_, bias, skip) = add, add.inputs
    output = last.outputs[0]
    if bias is None:
        bias = linear.zero_bias(graph, output, filters)
    scale = linear.scale_of_sums(graph, node, output, filters)
    new = ir.node(
        "QuantizedNhwcConv", [quantized, elements, scale, bias, *([] if skip is None else [skip])], domain=DOMAIN
    )
    replace_nodes(graph, new, node, last, node)
