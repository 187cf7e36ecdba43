"""MultiHeadAttention as the standard's own operator (ai.onnx Attention, opset 23), where its kernel is the faster one.

MultiHeadAttention(q, k, v, -, -, mask; num_heads)  =>  Attention(q, k, v, mask; q_num_heads, kv_num_heads)
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

OPSET = 23


def to_standard_attention(model: ir.Model, wanted: Callable[[ir.Node], bool]) -> int:
    """Replace the MultiHeadAttention nodes that `wanted` picks, in place; returns how many.

    Packed inputs and biases have no standard form and stay. The model's opset rises to 23 when a node was replaced.
    """
    made = 0
    for node in model.graph:
        if node.op_type != "MultiHeadAttention" or len(node.inputs) < 3 or None in node.inputs[:3] or not wanted(node):
            continue
        if any(value is not None for value in node.inputs[3:5]):
            continue
        mask = node.inputs[5] if len(node.inputs) > 5 else None
        heads = node.attributes["num_heads"].as_int()
        scale = node.attributes["scale"].as_float()
        causal = node.attributes.get_int("unidirectional", 0)
        node.op_type, node.domain = "Attention", ""
        node.resize_inputs(3 if mask is None else 4)
        if mask is not None:
            node.replace_input_with(3, mask)
        node.attributes.clear()
        for name, number in (("q_num_heads", heads), ("kv_num_heads", heads), ("is_causal", causal)):
            node.attributes[name] = ir.AttrInt64(name, number)
        node.attributes["scale"] = ir.AttrFloat32("scale", scale)
        made += 1
    if made:
        model.graph.opset_imports[""] = OPSET
    return made
