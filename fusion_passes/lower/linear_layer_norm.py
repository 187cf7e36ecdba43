"""Residuals in front of a LayerNormalization, added where a product is written rather than where it is normalized.

    LinearAdd(x, w) -> SkipLayerNormalization(., skip, g, h, b?) -> y, s
        =>  LinearAdd(x, w, b, skip) -> s -> LayerNormalization(s, g, h) -> y

The normalization then reads one tensor and writes one, where it read two and wrote two. Left alone: products with a
bias or residual of their own, those that something else reads too, a residual of another shape, a mean that is read.
Runs after `linear_add` and before `layer_norm`, which gives LayerNormalization our kernel.
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes import checks as c
from fusion_passes.lower import linear_add
from fusion_passes.operators.record import DOMAIN
from fusion_passes.pass_ import Case, Outcome, Pass, rewrite_nodes
from fusion_passes.rewriting import take_place


def linear_layer_norm(model: ir.Model) -> Outcome:
    """Rewrite the SkipLayerNormalization nodes of `model` in place."""
    return rewrite_nodes(model, "linear_layer_norm", "SkipLayerNormalization", _refuse, _rewrite)


def _refuse(node: ir.Node) -> str | None:
    if not c.same_shape(*node.inputs[:2]):
        return "its residual is of another shape"
    if any(output.uses() or output.is_graph_output() for output in node.outputs[1:3]):
        return "its mean or deviation is read"
    return None if _product(node) is not None else "none of its terms is a product that it alone reads"


def _product(node: ir.Node) -> tuple[ir.Node, ir.Value] | None:
    """The LinearAdd without bias and residual that makes one of the terms for this node alone, and the other term."""
    for value, other in (node.inputs[:2], node.inputs[1::-1]):
        if value is None or other is None or len(list(value.uses())) != 1 or value.is_graph_output():
            continue
        made = value.producer()
        if made is not None and (made.domain, made.op_type) == (DOMAIN, "LinearAdd") and not any(made.inputs[2:]):
            return made, other
    return None


def _rewrite(graph: ir.Graph, node: ir.Node) -> None:
    found = _product(node)
    assert found is not None
    product, skip = found
    gamma, beta, *rest = node.inputs[2:]
    normal, total = node.outputs[0], node.outputs[3] if len(node.outputs) > 3 else None
    linear = ir.node("LinearAdd", [*product.inputs[:2], rest[0] if rest else None, skip], domain=DOMAIN)
    linear.metadata_props.update(product.metadata_props)
    if total is None or not total.name:
        total = product.outputs[0]
    take_place(graph, node, linear, total)
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    norm = ir.node("LayerNormalization", [linear.outputs[0], gamma, beta], {"axis": -1, "epsilon": epsilon})
    norm.metadata_props.update(node.metadata_props)
    take_place(graph, node, norm, normal)
    graph.remove(node, safe=True)
    graph.remove(product, safe=True)


def _graph(total: str, reads: str = "s", weight: str = "w", outputs: str = "") -> str:
    return f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[B,S,8] x, float[B,S,8] k, float[8,8] v) => (float[B,S,8] y, float[B,S,8] z {outputs})
        <float[8,8] w, float[8] b, float[8] gamma, float[8] beta> {{
            p = MatMul (x, {weight})
            {total}
            y = LayerNormalization <axis = -1, epsilon = 0.001> (s, gamma, beta)
            z = Relu ({reads})
        }}"""


def _case(name: str, graph: str, refused: str | None = None, fires: int = 1, **ops: int) -> Case:
    ops = ops or {"LinearAdd": 1, "LayerNormalization": 1, "SkipLayerNormalization": 0}
    return Case(name, graph, fires, ops, refused, {"B": 2, "S": 6})


_KEPT = {"SkipLayerNormalization": 1, "LayerNormalization": 0}
_SUM = "a = Add (p, b)  s = Add (a, k)"
CASES = [
    _case("bias and residual", _graph(_SUM)),
    _case("residual", _graph("s = Add (k, p)")),
    _case("sum not read again", _graph(_SUM, reads="k")),
    _case("product read twice", _graph(_SUM, reads="p"), "it alone reads", 0, **_KEPT),
    _case("no product", _graph("s = Add (x, k)", reads="p"), "it alone reads", 0, **_KEPT),
    _case("weight that is an input", _graph(_SUM, weight="v"), "it alone reads", 0, **_KEPT),
    _case("product is an output", _graph(_SUM, outputs=", float[B,S,8] p"), "it alone reads", 0, **_KEPT),
]

PASS = Pass("linear_layer_norm", linear_layer_norm, CASES, after=(*linear_add.PASS.after, linear_add.PASS))
