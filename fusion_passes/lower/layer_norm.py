"""Lowers LayerNormalization to SkipLayerNormalization, for targets with a slow or wrong LayerNormalization kernel.

    LayerNormalization(x, gamma, beta)  =>  SkipLayerNormalization(x, 0, gamma, beta)       0: a vector of zeros

The vector stays in the cache, so the kernel reads x once and writes the result once. Rejected: an axis other than the
last, no beta, a consumer of the mean. Runs after the fusions, which replace normalizations of a sum.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from fusion_passes import DOMAIN
from fusion_passes import value_queries as values
from fusion_passes.graph_edits import new_initializer, replace_nodes
from fusion_passes.graph_pass import Pass, PassCase, PassOutcome, rewrite_nodes


def layer_norm(model: ir.Model) -> PassOutcome:
    """Rewrite the LayerNormalization nodes of `model` in place."""
    return rewrite_nodes(model, "layer_norm", "LayerNormalization", _reject_reason, _rewrite)


def _reject_reason(node: ir.Node) -> str | None:
    x = node.inputs[0]
    width = values.size(x, -1)
    if width is None or not values.last_axis(node.attributes.get_int("axis", -1), x):
        return "it is not over a last axis of known size"
    if len(node.inputs) < 3 or not all(values.is_vector(value, width) for value in node.inputs[1:3]):
        return "gamma and beta are not constant vectors"
    is_read = any(other.uses() or other.is_graph_output() for other in node.outputs[1:])
    return "its mean or deviation has consumers" if is_read else None


def _rewrite(graph: ir.Graph, node: ir.Node) -> None:
    x, gamma, beta = node.inputs[:3]
    old, width = node.outputs[0], values.size(node.inputs[0], -1)
    zeros = new_initializer(graph, f"{old.name}.zeros", np.zeros(width or 0, np.float32))
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    new = ir.node("SkipLayerNormalization", [x, zeros, gamma, beta], {"epsilon": epsilon}, domain=DOMAIN, num_outputs=4)
    for index, output in enumerate(new.outputs[1:]):
        output.name = f"{old.name}.unread{index}"
    replace_nodes(graph, new, node, node)


def _case(name: str, call: str, rejection: str | None = None, inputs: str = "", outputs: str = "") -> PassCase:
    graph = f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[B,S,8] x {inputs}) => (float[B,S,8] y {outputs}) <float[8] gamma, float[8] beta, float[6,8] wide> {{
            {call}
            y = Relu (n)
        }}"""
    rewrites = int(rejection is None)
    ops = {"SkipLayerNormalization": rewrites, "LayerNormalization": 1 - rewrites}
    return PassCase(name, graph, rewrites, ops, rejection, {"B": 2, "S": 6})


CASES = [
    _case("last axis", "n = LayerNormalization <epsilon = 0.001> (x, gamma, beta)"),
    _case("last axis by number", "n = LayerNormalization <axis = 2> (x, gamma, beta)"),
    _case("two axes", "n = LayerNormalization <axis = 1> (x, wide, wide)", "last axis"),
    _case("no beta", "n = LayerNormalization (x, gamma)", "constant vectors"),
    _case("gamma that is an input", "n = LayerNormalization (x, v, beta)", "constant vectors", ", float[8] v"),
    _case("mean is read", "l, mean = LayerNormalization (x, gamma, beta)  n = Add (l, mean)", "mean"),
    _case("an output", "n = LayerNormalization (x, gamma, beta)", outputs=", float[B,S,8] n"),
]

PASS = Pass("layer_norm", layer_norm, CASES)
