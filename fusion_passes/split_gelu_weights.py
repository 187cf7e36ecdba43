"""Gated feed-forward without a Split: two projections instead of one that is cut apart (for CPUs).

    MatMul(x, W) -> BiasSplitGelu(b)
        =>  (MatMul(x, W_left) + b_left) * BiasGelu(MatMul(x, W_right), b_right)

A Split copies its whole input; two MatMuls of half the width do the same arithmetic and write the halves where they
are read. Left alone where the projection's weight is not constant or its result is read elsewhere. The halves of the
weight are cut while the model is saved.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from fusion_passes import _checks as c
from fusion_passes._lazy import derived

CONTRIB = "com.microsoft"


def split_gelu_weights(model: ir.Model) -> int:
    """Rewrite BiasSplitGelu nodes of `model` in place; returns how many."""
    made = 0
    for node in list(model.graph):
        if node.op_type != "BiasSplitGelu":
            continue
        product, bias = node.inputs
        matmul = product.producer() if product is not None else None
        if product is None or bias is None or matmul is None or matmul.op_type != "MatMul" or len(c.users(product)) > 1:
            continue
        x, weight = matmul.inputs
        if x is None or weight is None or not c.is_constant(weight) or c.rank(weight) != 2:
            continue
        _replace(model.graph, node, x, weight, bias)
        made += 1
    if made:
        model.graph.opset_imports.setdefault(CONTRIB, 1)
        common.RemoveUnusedNodesPass()(model)
    return made


def _replace(graph: ir.Graph, node: ir.Node, x: ir.Value, weight: ir.Value, bias: ir.Value) -> None:
    rows, width = c.size(weight, 0), c.size(weight, 1)
    assert rows is not None
    assert width is not None
    half, out = width // 2, node.outputs[0]

    def left(a: np.ndarray) -> np.ndarray:
        return a[..., :half]

    def right(a: np.ndarray) -> np.ndarray:
        return a[..., half:]

    parts = []
    for name, cut in (("left", left), ("right", right)):
        w = derived(graph, f"{out.name}.{name}_weight", [weight], [rows, half], cut)
        b = derived(graph, f"{out.name}.{name}_bias", [bias], [half], cut)
        product = ir.node("MatMul", [x, w])
        domain, op_type = (CONTRIB, "BiasGelu") if name == "right" else ("", "Add")
        biased = ir.node(op_type, [product.outputs[0], b], domain=domain)
        parts += [product, biased]
    parts.append(ir.node("Mul", [parts[1].outputs[0], parts[3].outputs[0]]))
    for part, suffix in zip(parts, ("left", "left_biased", "right", "gate", "gated"), strict=True):
        part.metadata_props.update(node.metadata_props)
        result = part.outputs[0]
        result.name, result.type, result.shape = f"{out.name}.{suffix}", out.type, out.shape
    graph.insert_before(node, parts)
    ir.convenience.replace_all_uses_with(out, parts[-1].outputs[0], replace_graph_outputs=True)
    graph.remove(node, safe=True)
