"""Lowers attention to Bfloat16Attention, which rounds float32 tensors to bfloat16 for the CPU's matrix units.

    MultiHeadAttention(query, key, value; num_heads, scale)  =>  Bfloat16Attention(query, key, value; num_heads, scale)

Rejected: masks, biases and causal attention. Only text encoders have these, and their few tokens stay in float32.
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.graph_pass import Pass, PassCase, PassOutcome, rewrite_nodes

NAME = "bfloat16_attention"


def bfloat16_attention(model: ir.Model) -> PassOutcome:
    """Rewrite the attentions of `model` in place."""
    return rewrite_nodes(model, NAME, "MultiHeadAttention", _reject_reason, _rewrite)


def _reject_reason(node: ir.Node) -> str | None:
    if any(value is not None for value in node.inputs[3:]):
        return "it has a mask or a bias"
    return "it is causal" if node.attributes.get_int("unidirectional", 0) else None


def _rewrite(graph: ir.Graph, node: ir.Node) -> None:
    node.op_type = "Bfloat16Attention"
    node.attributes.pop("unidirectional", None)


def _case(name: str, inputs: str, rejection: str | None = None, queries: str = "B,S,8", causal: int = 0) -> PassCase:
    graph = f"""<ir_version: 10, opset_import: ["" : 21, "sd_ort" : 1]>
        g (float[{queries}] q, float[B,L,8] k, float[B,1,S,L] m) => (float[B,S,8] y) {{
            y = sd_ort.MultiHeadAttention <num_heads = 2, scale = 0.45, unidirectional = {causal}> ({inputs})
        }}"""
    rewrites = int(rejection is None)
    ops = {"Bfloat16Attention": rewrites, "MultiHeadAttention": 1 - rewrites}
    return PassCase(name, graph, rewrites, ops, rejection, {"B": 2, "S": 5, "L": 3})


CASES = [
    _case("text", "q, k, k"),
    _case("packed", "q", queries="B,S,2,3,4"),
    _case("a mask", "q, k, k, , , m", "mask"),
    _case("causal", "q, q, q", "causal", causal=1),
]

PASS = Pass(NAME, bfloat16_attention, CASES, rounds_to_bfloat16=True)
