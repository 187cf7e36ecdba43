"""MultiHeadAttention as the standard's own operator (ai.onnx Attention, opset 23), where its kernel is the faster one.

    MultiHeadAttention(q, k, v, -, -, mask; num_heads)  =>  Attention(q, k, v, mask; q_num_heads, kv_num_heads)

Packed inputs and biases have no standard form and stay. The model's opset rises to 23 when a node was replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import onnx_ir as ir

from fusion_passes.pass_ import Case, Outcome, Pass, rewrite_nodes

OPSET = 23


def standard_attention(why_not: Callable[[ir.Node], str | None]) -> Pass:
    """The pass that replaces the MultiHeadAttention nodes that `why_not` gives no reason to leave."""

    def run(model: ir.Model) -> Outcome:
        outcome = rewrite_nodes(model, "standard_attention", "MultiHeadAttention", partial(_refuse, why_not), _rewrite)
        if outcome.counts.total():
            model.graph.opset_imports[""] = OPSET
        return outcome

    return Pass("standard_attention", run, CASES)


def _refuse(why_not: Callable[[ir.Node], str | None], node: ir.Node) -> str | None:
    if len(node.inputs) < 3 or None in node.inputs[:3]:
        return "packed inputs have no standard form"
    if any(value is not None for value in node.inputs[3:5]):
        return "a bias has no standard form"
    return why_not(node)


def _rewrite(graph: ir.Graph, node: ir.Node) -> None:
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


_SIZES = {"B": 2, "S": 5, "L": 3}


def _case(name: str, inputs: str, refused: str | None = None, queries: str = "B,S,8") -> Case:
    graph = f"""<ir_version: 10, opset_import: ["" : 21, "sd_ort" : 1]>
        g (float[{queries}] q, float[B,L,8] k, float[B,1,S,L] m) => (float[B,S,8] y) {{
            y = sd_ort.MultiHeadAttention <num_heads = 2, scale = 0.45, unidirectional = 0> ({inputs})
        }}"""
    fires = int(refused is None)
    return Case(name, graph, fires, {"Attention": fires, "MultiHeadAttention": 1 - fires}, refused, _SIZES)


CASES = [
    _case("text", "q, k, k"),
    _case("a mask", "q, k, k, , , m"),
    _case("packed", "q", "packed", "B,S,2,3,4"),
]
