"""Packed projections: one MatMul instead of three (self-attention) or two (cross-attention), read in place.

    x -> MatMul(Wq), MatMul(Wk), MatMul(Wv) -> MultiHeadAttention
        =>  MatMul(x, Wqkv) -> Reshape [B,S,N,3,D] -> MultiHeadAttention(packed QKV)
    e -> MatMul(Wk), MatMul(Wv) -> MultiHeadAttention(q, ., .)
        =>  MatMul(e, Wkv) -> Reshape [B,L,N,2,D] -> MultiHeadAttention(q, packed KV)

Left alone: projections with a bias, an attention with a mask, a projection that something else reads, weights that
are not constant, heads of different size. The packed weight is computed while the model is saved.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from fusion_passes import checks as c
from fusion_passes.rewriting import constant, derived


def pack_qkv(model: ir.Model) -> dict[str, int]:
    """Pack projections in place; returns how many attentions read packed QKV and packed KV."""
    packed = {"packed_qkv": 0, "packed_kv": 0}
    for node in list(model.graph):
        if node.op_type != "MultiHeadAttention" or len([v for v in node.inputs if v is not None]) != 3:
            continue
        q, k, v = node.inputs[:3]
        sources = [_projection(value) for value in (q, k, v)]
        if sources[1] is None or sources[2] is None or sources[1][0] is not sources[2][0]:
            continue
        widths = {c.size(value, -1) for value in (q, k, v)}
        if len(widths) != 1 or None in widths:
            continue
        if sources[0] is not None and sources[0][0] is sources[1][0]:
            together = [s for s in sources if s is not None]
            node.replace_input_with(0, _pack(model.graph, node, together))
            node.resize_inputs(1)
            packed["packed_qkv"] += 1
        else:
            together = [s for s in sources[1:] if s is not None]
            node.replace_input_with(1, _pack(model.graph, node, together))
            node.resize_inputs(2)
            packed["packed_kv"] += 1
    common.RemoveUnusedNodesPass()(model)
    return packed


def _projection(value: ir.Value | None) -> tuple[ir.Value, ir.Value] | None:
    """(input, weight) of the MatMul that alone yields `value` for one attention."""
    node = None if value is None else value.producer()
    if value is None or node is None or node.op_type != "MatMul" or len(c.users(value)) != 1:
        return None
    x, weight = node.inputs
    return (
        (x, weight) if x is not None and weight is not None and c.is_constant(weight) and c.rank(weight) == 2 else None
    )


def _pack(graph: ir.Graph, node: ir.Node, sources: Sequence[tuple[ir.Value, ir.Value]]) -> ir.Value:
    x, heads, parts = sources[0][0], node.attributes["num_heads"].as_int(), len(sources)
    rows, width = c.size(sources[0][1], 0), c.size(sources[0][1], 1)
    assert rows is not None
    assert width is not None
    name = f"{node.outputs[0].name}.{'qkv' if parts == 3 else 'kv'}"

    def interleave(*weights: np.ndarray) -> np.ndarray:
        return np.stack([w.reshape(rows, heads, -1) for w in weights], axis=2).reshape(rows, -1)

    weight = derived(graph, f"{name}_weight", [w for _, w in sources], [rows, parts * width], interleave)
    product = ir.node("MatMul", [x, weight])
    shape = constant(graph, f"{name}_shape", [0, 0, heads, parts, width // heads])
    split = ir.node("Reshape", [product.outputs[0], shape])
    product.outputs[0].name, split.outputs[0].name = f"{name}_projection", name
    if x.dtype is not None:
        product.outputs[0].dtype = split.outputs[0].dtype = x.dtype
    if x.shape is not None:
        product.outputs[0].shape = ir.Shape([*list(x.shape)[:2], parts * width])
        split.outputs[0].shape = ir.Shape([*list(x.shape)[:2], heads, parts, width // heads])
    graph.insert_before(node, [product, split])
    return split.outputs[0]
