"""Lowers convolutions between QDQ to QuantizedConv, the CPU's kernel in int8.

    x = DequantizeLinear(q, s), w = DequantizeLinear(e, t)     s a number, t a number or one a filter
    Conv(x, w, b?)  =>  QuantizedConv(q, e, s t, b or 0; stride)     3 x 3 with pads 1, or 1 x 1 without; stride 1 or 2

Rejected: the operands that `quantized_linear` rejects; other filters, strides, pads, dilations or groups.
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes import DOMAIN
from fusion_passes import value_queries as values
from fusion_passes.graph_edits import replace_nodes
from fusion_passes.graph_pass import PassOutcome
from fusion_passes.lower import quantized_linear as linear
from fusion_passes.lower.bfloat16_matmul_conv import tiles_reject_reason


def quantized_conv(model: ir.Model) -> PassOutcome:
    """Rewrite the convolutions of `model` in place; count them. Those without a dequantized input are no matches."""
    return linear.lower_quantized(model, "quantized_conv", ("Conv",), _reject_reason, _rewrite)


def _reject_reason(node: ir.Node) -> str | None:
    return linear.reject_reason(node, 4, 0) or kernel_reject_reason(node)


def kernel_reject_reason(node: ir.Node) -> str | None:
    """Return why the kernel does not compute a convolution, quantized or to be quantized, or None."""
    shape = values.dims(node.inputs[1])
    return "its filters have no known shape" if shape is None else tiles_reject_reason(node, shape)


def _rewrite(graph: ir.Graph, node: ir.Node) -> None:
    quantized, elements = linear.quantized_operands(node)
    (output,), filters = node.outputs, values.static_size(elements, 0)
    bias = node.inputs[2] if len(node.inputs) > 2 and node.inputs[2] is not None else None
    inputs = [
        quantized,
        elements,
        linear.scale_of_sums(graph, node, output, filters),
        linear.zero_bias(graph, output, filters) if bias is None else bias,
    ]
    attributes = {"stride": (node.attributes.get_ints("strides") or (1,))[0], "x_last": 0, "y_last": 0}
    new = ir.node("QuantizedConv", inputs, attributes, domain=DOMAIN)
    replace_nodes(graph, new, node, node)
