"""Attention that a CPU's matrix units compute, of float32 tensors rounded to bfloat16.

    MultiHeadAttention(query, key, value; num_heads, scale)  =>  Bfloat16Attention(query, key, value; num_heads, scale)

Refused: masks, biases and causal attention, which text encoders have: their few tokens stay in float32.
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.pass_ import Case, Outcome, Pass, rewrite_nodes

NAME = "bfloat16_attention"


def bfloat16_attention(model: ir.Model) -> Outcome:
    """Rewrite the attentions of `model` in place; counts them."""
    return rewrite_nodes(model, NAME, "MultiHeadAttention", _refuse, _rewrite)


def _refuse(node: ir.Node) -> str | None:
    if any(value is not None for value in node.inputs[3:]):
        return "it has a mask or a bias"
    return "it is causal" if node.attributes.get_int("unidirectional", 0) else None


def _rewrite(graph: ir.Graph, node: ir.Node) -> None:
    node.op_type = "Bfloat16Attention"
    node.attributes.pop("unidirectional", None)


def _case(name: str, inputs: str, refused: str | None = None, queries: str = "B,S,8", causal: int = 0) -> Case:
    graph = f"""<ir_version: 10, opset_import: ["" : 21, "sd_ort" : 1]>
        g (float[{queries}] q, float[B,L,8] k, float[B,1,S,L] m) => (float[B,S,8] y) {{
            y = sd_ort.MultiHeadAttention <num_heads = 2, scale = 0.45, unidirectional = {causal}> ({inputs})
        }}"""
    fires = int(refused is None)
    ops = {"Bfloat16Attention": fires, "MultiHeadAttention": 1 - fires}
    return Case(name, graph, fires, ops, refused, {"B": 2, "S": 5, "L": 3})


CASES = [
    _case("text", "q, k, k"),
    _case("packed", "q", queries="B,S,2,3,4"),
    _case("a mask", "q, k, k, , , m", "mask"),
    _case("causal", "q, q, q", "causal", causal=1),
]

PASS = Pass(NAME, bfloat16_attention, CASES, rounds=True)
