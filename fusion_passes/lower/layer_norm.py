"""LayerNormalization by the kernel of SkipLayerNormalization, for targets whose own is slow.

    LayerNormalization(x, gamma, beta)  =>  SkipLayerNormalization(x, 0, gamma, beta)       0: a row of zeros

The row stays in the cache, so the kernel reads x once and writes the result once. Left alone: another axis than the
last, a normalization without beta, one whose mean is read. Runs after the fusions, which take what follows a sum.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from fusion_passes import checks as c
from fusion_passes.operators.record import DOMAIN
from fusion_passes.rewriting import constant


def layer_norm(model: ir.Model) -> int:
    """Rewrite LayerNormalization nodes of `model` in place; returns how many."""
    made = 0
    for node in list(model.graph):
        if node.op_type == "LayerNormalization" and node.domain == "" and _fits(node):
            _replace(model.graph, node)
            made += 1
    return made


def _fits(node: ir.Node) -> bool:
    x, output = node.inputs[0], node.outputs[0]
    width = c.size(x, -1)
    affine = len(node.inputs) > 2 and all(c.is_vector(value, width) for value in node.inputs[1:3])
    alone = not any(other.uses() for other in node.outputs[1:])
    last = c.last_axis(node.attributes.get_int("axis", -1), x)
    return width is not None and affine and alone and last and not output.is_graph_output()


def _replace(graph: ir.Graph, node: ir.Node) -> None:
    x, gamma, beta = node.inputs[:3]
    old, width = node.outputs[0], c.size(node.inputs[0], -1)
    zeros = constant(graph, f"{old.name}.zeros", np.zeros(width or 0, np.float32))
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    new = ir.node("SkipLayerNormalization", [x, zeros, gamma, beta], {"epsilon": epsilon}, domain=DOMAIN, num_outputs=4)
    new.metadata_props.update(node.metadata_props)
    made = new.outputs[0]
    made.name, made.type, made.shape = old.name, old.type, old.shape
    for index, output in enumerate(new.outputs[1:]):
        output.name = f"{old.name}.unread{index}"
    graph.insert_before(node, new)
    ir.convenience.replace_all_uses_with(old, made)
    graph.remove(node, safe=True)
