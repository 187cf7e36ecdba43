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
from fusion_passes.pass_ import Case, Outcome, Pass, rewrite_nodes
from fusion_passes.rewriting import constant, take_place


def layer_norm(model: ir.Model) -> Outcome:
    """Rewrite the LayerNormalization nodes of `model` in place."""
    return rewrite_nodes(model, "layer_norm", "LayerNormalization", _refuse, _rewrite)


def _refuse(node: ir.Node) -> str | None:
    x, output = node.inputs[0], node.outputs[0]
    width = c.size(x, -1)
    if width is None or not c.last_axis(node.attributes.get_int("axis", -1), x):
        return "it is not over the last axis, of known size"
    if len(node.inputs) < 3 or not all(c.is_vector(value, width) for value in node.inputs[1:3]):
        return "gamma and beta are not constant vectors"
    if any(other.uses() for other in node.outputs[1:]):
        return "its mean or deviation is read"
    return "its result is an output of the graph" if output.is_graph_output() else None


def _rewrite(graph: ir.Graph, node: ir.Node) -> None:
    x, gamma, beta = node.inputs[:3]
    old, width = node.outputs[0], c.size(node.inputs[0], -1)
    zeros = constant(graph, f"{old.name}.zeros", np.zeros(width or 0, np.float32))
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    new = ir.node("SkipLayerNormalization", [x, zeros, gamma, beta], {"epsilon": epsilon}, domain=DOMAIN, num_outputs=4)
    new.metadata_props.update(node.metadata_props)
    for index, output in enumerate(new.outputs[1:]):
        output.name = f"{old.name}.unread{index}"
    take_place(graph, node, new, old)
    graph.remove(node, safe=True)


def _case(name: str, call: str, refused: str | None = None, inputs: str = "", outputs: str = "") -> Case:
    graph = f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[B,S,8] x {inputs}) => (float[B,S,8] y {outputs}) <float[8] gamma, float[8] beta, float[6,8] wide> {{
            {call}
            y = Relu (n)
        }}"""
    fires = int(refused is None)
    ops = {"SkipLayerNormalization": fires, "LayerNormalization": 1 - fires}
    return Case(name, graph, fires, ops, refused, {"B": 2, "S": 6})


CASES = [
    _case("last axis", "n = LayerNormalization <epsilon = 0.001> (x, gamma, beta)"),
    _case("last axis by number", "n = LayerNormalization <axis = 2> (x, gamma, beta)"),
    _case("two axes", "n = LayerNormalization <axis = 1> (x, wide, wide)", "last axis"),
    _case("no beta", "n = LayerNormalization (x, gamma)", "constant vectors"),
    _case("gamma that is an input", "n = LayerNormalization (x, v, beta)", "constant vectors", ", float[8] v"),
    _case("mean is read", "l, mean = LayerNormalization (x, gamma, beta)  n = Add (l, mean)", "mean"),
    _case("an output", "n = LayerNormalization (x, gamma, beta)", "an output", outputs=", float[B,S,8] n"),
]

PASS = Pass("layer_norm", layer_norm, CASES)
