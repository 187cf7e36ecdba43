"""Lowers MatMul + BiasSplitGelu to LinearSplitGelu (a complete GEGLU layer), which only the sd-ort provider has.

    MatMul(x, w) -> BiasSplitGelu(., b)  =>  LinearSplitGelu(x, w, b)

Rejected: an input that no MatMul computes, a MatMul with other consumers or whose output is a graph output, a weight
that is not a constant matrix. Runs before `linear_add`, which replaces the remaining MatMuls.
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes import DOMAIN
from fusion_passes import value_queries as values
from fusion_passes.graph_edits import replace_nodes
from fusion_passes.graph_pass import Pass, PassCase, PassOutcome, rewrite_nodes


def linear_split_gelu(model: ir.Model) -> PassOutcome:
    """Rewrite the BiasSplitGelu nodes of `model` in place."""
    return rewrite_nodes(model, "linear_split_gelu", "BiasSplitGelu", _reject_reason, _rewrite)


def _reject_reason(node: ir.Node) -> str | None:
    x = node.inputs[0]
    matmul = None if x is None else x.producer()
    if x is None or matmul is None or matmul.op_type != "MatMul" or matmul.domain != "":
        return "its input is not the output of a MatMul"
    if len(list(x.uses())) != 1 or x.is_graph_output():
        return "its MatMul has other consumers"
    weight = matmul.inputs[1]
    is_matrix = values.is_constant(weight) and values.rank(weight) == 2
    return None if is_matrix else "the weight of its MatMul is not a constant matrix"


def _rewrite(graph: ir.Graph, node: ir.Node) -> None:
    x, bias = node.inputs
    matmul = values.producer(x)
    new = ir.node("LinearSplitGelu", [*matmul.inputs, bias], domain=DOMAIN)
    replace_nodes(graph, new, node, node, matmul)


_BIASED = "a = Add (m, b)"
_GATE = "l, r = Split <axis = -1> (a, halves)  g = Gelu (r)  y = Mul (l, g)"
_REST = f"{_BIASED}  {_GATE}"


def _case(
    name: str, body: str, rejection: str | None = None, rewrites: int = 0, fused: int = 0, outputs: str = ""
) -> PassCase:
    """`fused`: the expected number of remaining BiasSplitGelu nodes."""
    graph = f"""<ir_version: 10, opset_import: ["" : 21]>
        f (float[N,S,6] x, float[6,8] given) => (float[N,S,4] y {outputs})
        <float[6,8] w, float[2,6,8] apart, float[8] b, float[1] one, int64[2] halves = {{4, 4}}> {{ {body} }}"""
    ops = {"LinearSplitGelu": rewrites, "BiasSplitGelu": fused, "MatMul": 1 - rewrites}
    return PassCase(name, graph, rewrites, ops, rejection, {"N": 2, "S": 5})


def _rejected(name: str, body: str, rejection: str, outputs: str = "") -> PassCase:
    return _case(name, body, rejection, fused=1, outputs=outputs)


CASES = [
    _case("GEGLU", f"m = MatMul (x, w)  {_REST}", rewrites=1),
    _case("operands swapped", f"m = MatMul (x, w)  a = Add (b, m)  {_GATE.replace('l, g', 'g, l')}", rewrites=1),
    _rejected("product read twice", f"m = MatMul (x, w)  {_REST}  z = Relu (m)", "other consumers", ", float[N,S,8] z"),
    _rejected("product is an output", f"m = MatMul (x, w)  {_REST}", "other consumers", ", float[N,S,8] m"),
    _rejected("weight is an input", f"m = MatMul (x, given)  {_REST}", "not a constant matrix"),
    _rejected("a matrix a sample", f"m = MatMul (x, apart)  {_REST}", "not a constant matrix"),
    _rejected("something between", f"e = MatMul (x, w)  m = Relu (e)  {_REST}", "not the output of a MatMul"),
    _case("one bias for all", f"m = MatMul (x, w)  a = Add (m, one)  {_GATE}"),
    _case("no bias", f"a = MatMul (x, w)  {_GATE}"),
    _case("tanh approximation", f"m = MatMul (x, w)  {_REST}".replace("Gelu", 'Gelu <approximate = "tanh">')),
    _case("Silu", f"m = MatMul (x, w)  {_REST}".replace("g = Gelu (r)", "d = Sigmoid (r)  g = Mul (r, d)")),
]

PASS = Pass("linear_split_gelu", linear_split_gelu, CASES)
