"""Packs projections: one MatMul instead of three (self-attention) or two (cross-attention), which attention reads.

    x -> MatMul(Wq), MatMul(Wk), MatMul(Wv) -> MultiHeadAttention
        =>  MatMul(x, Wqkv) -> Reshape [B,S,N,3,D] -> MultiHeadAttention(packed QKV)
    e -> MatMul(Wk), MatMul(Wv) -> MultiHeadAttention(q, ., .)
        =>  MatMul(e, Wkv) -> Reshape [B,L,N,2,D] -> MultiHeadAttention(q, packed KV)

Rejected: projections with a bias, an attention with a mask, a projection with other consumers, weights that are not
constant, heads of different sizes. The packed weight is computed when the model is saved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

import onnx_ir as ir
import onnx_ir.passes.common as common

from fusion_passes import value_queries as values
from fusion_passes.graph_edits import new_derived_initializer, new_initializer
from fusion_passes.graph_pass import Pass, PassCase, PassOutcome, Rejection

Projection = tuple[ir.Value, ir.Value]  # input, weight


def pack_qkv(model: ir.Model, attention: str = "MultiHeadAttention") -> PassOutcome:
    """Pack the projections of the operator `attention` in place; count those with packed QKV and with packed KV."""
    outcome = PassOutcome(Counter(packed_qkv=0, packed_kv=0))
    for node in list(model.graph):
        if node.op_type != attention:
            continue
        reason = _reject_reason(node)
        if reason is not None:
            outcome.rejections.append(Rejection(node, reason))
            continue
        query, key, value = (_projection(operand) for operand in node.inputs[:3])
        assert key is not None
        assert value is not None
        if query is not None and query[0] is key[0]:
            node.replace_input_with(0, _pack(model.graph, node, (query, key, value)))
            node.resize_inputs(1)
            outcome.counts["packed_qkv"] += 1
        else:
            node.replace_input_with(1, _pack(model.graph, node, (key, value)))
            node.resize_inputs(2)
            outcome.counts["packed_kv"] += 1
    common.RemoveUnusedNodesPass()(model)
    return outcome


def _reject_reason(node: ir.Node) -> str | None:
    if len([value for value in node.inputs if value is not None]) != 3:
        return "it has a mask or a bias, or is packed already"
    key, value = (_projection(operand) for operand in node.inputs[1:3])
    if key is None or value is None:
        return "key or value is not a MatMul with a constant matrix and no other consumers"
    if key[0] is not value[0]:
        return "key and value are projected from two tensors"
    widths = {values.size(operand, -1) for operand in node.inputs[:3]}
    return "query, key and value differ in width" if len(widths) != 1 or None in widths else None


def _projection(value: ir.Value | None) -> Projection | None:
    """Return (input, weight) of the MatMul that computes `value` for this one consumer, or None."""
    node = None if value is None else value.producer()
    if value is None or node is None or node.op_type != "MatMul" or len(values.consumers(value)) != 1:
        return None
    x, weight = node.inputs
    matrix = weight is not None and values.is_constant(weight) and values.rank(weight) == 2
    return (x, weight) if matrix and x is not None and weight is not None else None


def _pack(graph: ir.Graph, node: ir.Node, sources: Sequence[Projection]) -> ir.Value:
    x, heads, parts = sources[0][0], node.attributes["num_heads"].as_int(), len(sources)
    rows, width = values.static_size(sources[0][1], 0), values.static_size(sources[0][1], 1)
    name = f"{node.outputs[0].name}.{'qkv' if parts == 3 else 'kv'}"

    weight = new_derived_initializer(
        graph, f"{name}_weight", [w for _, w in sources], [rows, parts * width], "interleave", heads
    )
    product = ir.node("MatMul", [x, weight])
    shape = new_initializer(graph, f"{name}_shape", [0, 0, heads, parts, width // heads])
    split = ir.node("Reshape", [product.outputs[0], shape])
    product.outputs[0].name, split.outputs[0].name = f"{name}_projection", name
    if x.dtype is not None:
        product.outputs[0].dtype = split.outputs[0].dtype = x.dtype
    if x.shape is not None:
        product.outputs[0].shape = ir.Shape([*list(x.shape)[:2], parts * width])
        split.outputs[0].shape = ir.Shape([*list(x.shape)[:2], heads, parts, width // heads])
    graph.insert_before(node, [product, split])
    return split.outputs[0]


def _case(
    name: str,
    body: str,
    rejection: str | None = None,
    matmuls: int = 3,
    query: str = "q = MatMul (x, a)",
    attention: str = "MultiHeadAttention <num_heads = 2, scale = 0.45, unidirectional = 0>",
) -> PassCase:
    graph = f"""<ir_version: 10, opset_import: ["" : 21, "sd_ort" : 1]>
        g (float[B,S,8] x, float[B,L,6] e, float[B,L,6] f, float[6,8] w) => (float[B,S,8] y)
        <float[8,8] a, float[8,8] b, float[8,8] c, float[6,8] d, float[6,8] h, float[8] bias, float scale = {{0.4}}> {{
            {query}
            {body}
            y = sd_ort.{attention} (q, k, v)
        }}"""
    return PassCase(name, graph, int(rejection is None), {"MatMul": matmuls}, rejection, {"B": 2, "S": 5, "L": 3})


_ALONE = "not a MatMul with a constant matrix and no other consumers"
CASES = [
    _case("self-attention", "k = MatMul (x, b)  v = MatMul (x, c)", matmuls=1),
    _case("text", "k = MatMul (e, d)  v = MatMul (e, h)", matmuls=2),
    _case("biased query", "k = MatMul (x, b)  v = MatMul (x, c)", None, 2, "p = MatMul (x, a)  q = Add (p, bias)"),
    _case("two texts", "k = MatMul (e, d)  v = MatMul (f, h)", "two tensors"),
    _case("biased key", "l = MatMul (e, d)  k = Add (l, bias)  v = MatMul (e, h)", _ALONE),
    _case("a weight that is an input", "k = MatMul (e, w)  v = MatMul (e, h)", _ALONE),
    _case("a key that is read again", "k = MatMul (e, d)  l = Relu (k)  v = MatMul (l, a)", _ALONE),
]

_bfloat16_case = partial(_case, attention="Bfloat16Attention <num_heads = 2, scale = 0.45>")
BFLOAT16_CASES = [
    _bfloat16_case("self-attention", "k = MatMul (x, b)  v = MatMul (x, c)", matmuls=1),
    _bfloat16_case("text", "k = MatMul (e, d)  v = MatMul (e, h)", matmuls=2),
    _bfloat16_case("two texts", "k = MatMul (e, d)  v = MatMul (f, h)", "two tensors"),
]

PASS = Pass("pack_qkv", pack_qkv, CASES)
# For Bfloat16Attention only: a provider may have no kernel for packed MultiHeadAttention.
BFLOAT16_PASS = Pass("pack_bfloat16_qkv", partial(pack_qkv, attention="Bfloat16Attention"), BFLOAT16_CASES)
