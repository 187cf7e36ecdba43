"""Lowers attention of packed queries, keys and values in float8 to QuantizedAttention, which needs no other precision.

    MultiHeadAttention(DequantizeLinear(q, s); scale = c, quantized_scale = t)
        =>  QuantizedAttention(q; scale = c s^2, quantized_scale = t / s)        q [B,S,N,3,D]

`attentions` finds those that can be quantized so, before QDQ is inserted: the packed tensor is written by one layer in
8 bits, and only such layers read the output. Rejected: attention with a mask, of separate tensors or of fewer heads of
keys; heads that are no multiples of 16 or larger than 128, for which cuDNN has no kernel. `quantized_attention` runs
after `float8_output`, which gives MultiHeadAttention its output in float8.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from fusion_passes import DOMAIN
from fusion_passes import value_queries as values
from fusion_passes.cleanup import remove_unused
from fusion_passes.graph_edits import replace_value
from fusion_passes.graph_pass import PassOutcome, rewrite_nodes
from fusion_passes.lower.float8_output import before_reshapes
from fusion_passes.lower.quantized_linear import dequantize
from fusion_passes.operators.definition import QUANTIZED_SCALE

HEAD_MULTIPLE, MAX_HEAD = 16, 128


def attentions(graph: ir.Graph, layers: Collection[ir.Node]) -> list[ir.Node]:
    """Return the nodes of `graph` whose packed input and output are of `layers`, the nodes in 8 bits."""
    return [node for node in graph if node.op_type == "MultiHeadAttention" and _is_between(node, layers)]


def _is_between(node: ir.Node, layers: Collection[ir.Node]) -> bool:
    packed = node.inputs[0]
    if any(value is not None for value in node.inputs[1:]) or values.rank(packed) != 5:
        return False
    head_size = values.size(packed, 4)
    if head_size is None or head_size % HEAD_MULTIPLE or head_size > MAX_HEAD:
        return False
    if node.attributes.get_int("unidirectional", 0) or len(node.outputs) > 1:
        return False
    source, reshapes = before_reshapes(packed)
    passed = [source, *(reshape.outputs[0] for reshape in reshapes)]
    if not all(value is not None and values.has_one_use(value) for value in passed):
        return False
    assert source is not None
    return source.producer() in layers and _is_read_by(node.outputs[0], layers)


def _is_read_by(value: ir.Value, layers: Collection[ir.Node]) -> bool:
    """Return whether `layers` alone read a value, as activations, or reshaped."""
    uses = list(value.uses())
    return (
        bool(uses)
        and not value.is_graph_output()
        and all(
            index == 0 and (node in layers or (node.op_type == "Reshape" and _is_read_by(node.outputs[0], layers)))
            for node, index in uses
        )
    )


def quantized_attention(model: ir.Model) -> PassOutcome:
    """Rewrite the attention nodes of `model` with a dequantized packed input in place; count them."""

    def is_candidate(node: ir.Node) -> bool:
        return node.op_type == "MultiHeadAttention" and dequantize(node.inputs[0]) is not None

    outcome = rewrite_nodes(model, "quantized_attention", is_candidate, _reject_reason, _rewrite)
    remove_unused(model.graph)
    return outcome


def _reject_reason(node: ir.Node) -> str | None:
    if any(value is not None for value in node.inputs[1:]) or values.rank(node.inputs[0]) != 5:
        return "its tensors are not packed"
    if QUANTIZED_SCALE not in node.attributes or node.outputs[0].uses() or node.outputs[0].is_graph_output():
        return "its output is not in float8 alone"
    producer = dequantize(node.inputs[0])
    assert producer is not None
    if values.scalar(producer.inputs[1]) is None or (len(producer.inputs) > 2 and producer.inputs[2] is not None):
        return "its input has a zero point, or a scale that is not a constant number"
    quantized = producer.inputs[0]
    if quantized is None or quantized.dtype != ir.DataType.FLOAT8E4M3FN:
        return "its input is not in float8"
    return None


def _rewrite(graph: ir.Graph, node: ir.Node) -> None:
    producer = dequantize(node.inputs[0])
    assert producer is not None
    input_scale, attributes = values.scalar(producer.inputs[1]), node.attributes
    assert input_scale is not None
    new = ir.node(
        "QuantizedAttention",
        [producer.inputs[0]],
        {
            "num_heads": attributes["num_heads"].as_int(),
            "scale": attributes["scale"].as_float() * input_scale**2,
            QUANTIZED_SCALE: attributes[QUANTIZED_SCALE].as_float() / input_scale,
        },
        domain=DOMAIN,
    )
    new.metadata_props.update(node.metadata_props)
    replace_value(graph, node, new, node.outputs[-1])
    graph.remove(node, safe=True)
