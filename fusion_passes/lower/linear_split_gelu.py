"""GEGLU layers whole, their product included: LinearSplitGelu, for our own provider, whose kernels alone do that.

    MatMul(x, w) -> BiasSplitGelu(., b)  =>  LinearSplitGelu(x, w, b)

Left alone: what is no product, a product that something else reads too, or is an output, weights that are no constant
matrices. Runs before `linear_add`, which takes the products that are left.
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes import checks as c
from fusion_passes.operators.record import DOMAIN
from fusion_passes.pass_ import Case, Outcome, Pass, rewrite_nodes
from fusion_passes.rewriting import take_place


def linear_split_gelu(model: ir.Model) -> Outcome:
    """Rewrite the BiasSplitGelu nodes of `model` in place."""
    return rewrite_nodes(model, "linear_split_gelu", "BiasSplitGelu", _refuse, _rewrite)


def _refuse(node: ir.Node) -> str | None:
    product = node.inputs[0]
    made = None if product is None else product.producer()
    if product is None or made is None or made.op_type != "MatMul" or made.domain != "":
        return "it reads no product"
    if len(list(product.uses())) != 1 or product.is_graph_output():
        return "something else reads its product too"
    weight = made.inputs[1]
    return None if c.is_constant(weight) and c.rank(weight) == 2 else "the weight of its product is no constant matrix"


def _rewrite(graph: ir.Graph, node: ir.Node) -> None:
    product, bias = node.inputs
    made = None if product is None else product.producer()
    assert made is not None
    new = ir.node("LinearSplitGelu", [*made.inputs, bias], domain=DOMAIN)
    new.metadata_props.update(node.metadata_props)
    take_place(graph, node, new, node.outputs[0])
    graph.remove(node, safe=True)
    graph.remove(made, safe=True)


_BIASED = "a = Add (m, b)"
_GATE = "l, r = Split <axis = -1> (a, halves)  g = Gelu (r)  y = Mul (l, g)"
_REST = f"{_BIASED}  {_GATE}"


def _case(name: str, body: str, refused: str | None = None, fires: int = 0, fused: int = 0, outputs: str = "") -> Case:
    """`fused`: how many BiasSplitGelu are left."""
    graph = f"""<ir_version: 10, opset_import: ["" : 21]>
        f (float[N,S,6] x, float[6,8] given) => (float[N,S,4] y {outputs})
        <float[6,8] w, float[2,6,8] apart, float[8] b, float[1] one, int64[2] halves = {{4, 4}}> {{ {body} }}"""
    ops = {"LinearSplitGelu": fires, "BiasSplitGelu": fused, "MatMul": 1 - fires}
    return Case(name, graph, fires, ops, refused, {"N": 2, "S": 5})


def _left(name: str, body: str, refused: str, outputs: str = "") -> Case:
    return _case(name, body, refused, fused=1, outputs=outputs)


CASES = [
    _case("GEGLU", f"m = MatMul (x, w)  {_REST}", fires=1),
    _case("operands swapped", f"m = MatMul (x, w)  a = Add (b, m)  {_GATE.replace('l, g', 'g, l')}", fires=1),
    _left("product read twice", f"m = MatMul (x, w)  {_REST}  z = Relu (m)", "something else", ", float[N,S,8] z"),
    _left("product is an output", f"m = MatMul (x, w)  {_REST}", "something else", ", float[N,S,8] m"),
    _left("weight is an input", f"m = MatMul (x, given)  {_REST}", "no constant matrix"),
    _left("a matrix a sample", f"m = MatMul (x, apart)  {_REST}", "no constant matrix"),
    _left("something between", f"e = MatMul (x, w)  m = Relu (e)  {_REST}", "no product"),
    _case("one bias for all", f"m = MatMul (x, w)  a = Add (m, one)  {_GATE}"),
    _case("no bias", f"a = MatMul (x, w)  {_GATE}"),
    _case("tanh approximation", f"m = MatMul (x, w)  {_REST}".replace("Gelu", 'Gelu <approximate = "tanh">')),
    _case("Silu", f"m = MatMul (x, w)  {_REST}".replace("g = Gelu (r)", "d = Sigmoid (r)  g = Mul (r, d)")),
]

PASS = Pass("linear_split_gelu", linear_split_gelu, CASES)
