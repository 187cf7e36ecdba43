"""Lowers the gate of a SwiGLU to SwiGlu, which reads its operands once.

    left, right = Split(x; last axis) -> QuickGelu(left; alpha = 1) * right  =>  SwiGlu(x)
    QuickGelu(gate; alpha = 1) * up                                          =>  SwiGlu(gate, up)

for targets with that kernel. Rejected: another alpha, as CLIP's; operands of different or unknown shapes; a SiLU with
other consumers.

`PACK` makes one product of two whose results are gate and up:

    SwiGlu(MatMul(x, V), MatMul(x, W))  =>  SwiGlu(MatMul(x, [V W]))

Rejected: operands that are no such products, have other consumers, or are of two tensors or of different widths.
"""

from __future__ import annotations

from functools import partial
from itertools import permutations

import onnx_ir as ir

from fusion_passes import DOMAIN
from fusion_passes import value_queries as values
from fusion_passes.graph_edits import new_derived_initializer, replace_nodes
from fusion_passes.graph_pass import Pass, PassCase, PassOutcome, Rejection, rewrite_nodes


def swiglu(model: ir.Model) -> PassOutcome:
    """Rewrite the products of `model` in place."""
    outcome = PassOutcome()
    for node in list(model.graph):
        if node.op_type != "Mul" or node.domain:
            continue
        for silu, up in permutations(node.inputs, 2):
            activation = None if silu is None else silu.producer()
            if silu is None or up is None or activation is None:
                continue
            if activation.op_type != "QuickGelu" or activation.domain != DOMAIN:
                continue
            if reason := _reject_reason(activation, silu, up):
                outcome.rejections.append(Rejection(node, reason))
            else:
                _rewrite(model.graph, node, activation, up)
                outcome.counts["swiglu"] += 1
                break
    return outcome


def _reject_reason(activation: ir.Node, silu: ir.Value, up: ir.Value) -> str | None:
    if activation.attributes.get_float("alpha", 1.0) != 1.0:
        return "its activation is not SiLU"
    if not values.same_shape(silu, up):
        return "gate and up differ in shape, or a shape is unknown"
    if len(list(silu.uses())) != 1 or silu.is_graph_output():
        return "the SiLU has other consumers"
    return None


def _halves(gate: ir.Value, up: ir.Value) -> ir.Node | None:
    """Return the Split of a last axis into `gate` and `up` alone, or None."""
    split = gate.producer()
    if split is None or split.op_type != "Split" or split.domain or list(split.outputs) != [gate, up]:
        return None
    if not values.last_axis(split.attributes.get_int("axis", 0), split.inputs[0]):
        return None
    alone = all(len(list(part.uses())) == 1 and not part.is_graph_output() for part in split.outputs)
    return split if alone and values.size(gate, -1) is not None else None


def _rewrite(graph: ir.Graph, node: ir.Node, activation: ir.Node, up: ir.Value) -> None:
    gate = values.operand(activation, 0)
    split = _halves(gate, up)
    fused = ir.node("SwiGlu", [gate, up] if split is None else [split.inputs[0]], domain=DOMAIN)
    replace_nodes(graph, fused, node, node, activation, *([] if split is None else [split]))


def pack_swiglu(model: ir.Model) -> PassOutcome:
    """Pack the products before the SwiGlu nodes of `model` in place."""
    return rewrite_nodes(model, "packed_swiglu", _has_two_inputs, _reject_products, _pack)


def _has_two_inputs(node: ir.Node) -> bool:
    return node.op_type == "SwiGlu" and node.domain == DOMAIN and len(node.inputs) == 2


def _pack(graph: ir.Graph, node: ir.Node) -> None:
    gate, up = _products(node)
    weights = [weight for product in (gate, up) if (weight := product.inputs[1]) is not None]
    rows, width = values.size(weights[0], 0) or 0, values.size(weights[0], 1) or 0
    name = f"{node.outputs[0].name}.gate_up"
    weight = new_derived_initializer(graph, f"{name}_weight", weights, [rows, 2 * width], "interleave", 1)
    packed = ir.node("MatMul", [gate.inputs[0], weight])
    packed.metadata_props.update(gate.metadata_props)
    total, half = packed.outputs[0], gate.outputs[0]
    total.name, total.type = name, half.type
    total.shape = None if half.shape is None else ir.Shape([*list(half.shape)[:-1], 2 * width])
    graph.insert_before(node, packed)
    node.replace_input_with(0, total)
    node.resize_inputs(1)
    for old in (gate, up):
        graph.remove(old, safe=True)


def _products(node: ir.Node) -> list[ir.Node]:
    return [product for value in node.inputs if (product := _product(value)) is not None]


def _product(value: ir.Value | None) -> ir.Node | None:
    """Return the MatMul by a constant matrix that computes `value` for one consumer, or None."""
    node = None if value is None else value.producer()
    if value is None or node is None or node.op_type != "MatMul" or node.domain or len(list(value.uses())) != 1:
        return None
    weight = node.inputs[1]
    return node if weight is not None and values.is_constant(weight) and values.rank(weight) == 2 else None


def _reject_products(node: ir.Node) -> str | None:
    products = _products(node)
    if len(products) != 2:
        return "gate or up is not a MatMul with a constant matrix and no other consumers"
    if products[0].inputs[0] is not products[1].inputs[0]:
        return "gate and up are products of two tensors"
    widths = {values.size(product.inputs[1], 1) for product in products if product.inputs[1] is not None}
    return "gate and up differ in width" if len(widths) != 1 or None in widths else None


def _graph(body: str, outputs: str = "", up: str = "B,S,4") -> str:
    return f"""<ir_version: 10, opset_import: ["" : 21, "sd_ort" : 1]>
        g (float[B,S,8] x, float[B,S,4] a, float[{up}] b) => (float[B,S,4] y {outputs}) {{ {body} }}"""


_SILU = "s = sd_ort.QuickGelu <alpha = 1.0>"
_HALVES = "l, r = Split <axis = 2, num_outputs = 2> (x)"
_case = partial(PassCase, sizes={"B": 2, "S": 6}, ops={"SwiGlu": 1, "QuickGelu": 0, "Mul": 0, "Split": 0})
_rejected = partial(PassCase, sizes={"B": 2, "S": 6}, rewrites=0, ops={"SwiGlu": 0, "QuickGelu": 1, "Mul": 1})
CASES = [
    _case("halves", _graph(f"{_HALVES}  {_SILU} (l)  y = Mul (s, r)")),
    _case("halves, operands swapped", _graph(f"{_HALVES.replace('2,', '-1,', 1)}  {_SILU} (l)  y = Mul (r, s)")),
    _case("two tensors", _graph(f"{_SILU} (a)  y = Mul (s, b)")),
    _case("the gate on the right half", _graph(f"{_HALVES}  {_SILU} (r)  y = Mul (s, l)"),
          ops={"SwiGlu": 1, "Split": 1}),
    _case(
        "a half is read again",
        _graph(f"{_HALVES}  {_SILU} (l)  m = Mul (s, r)  y = Sub (m, r)"), ops={"SwiGlu": 1, "Split": 1},
    ),
    _case(
        "halves of another axis",
        _graph(f"q = Concat <axis = 1> (a, b)  l, r = Split <axis = 1, num_outputs = 2> (q)"
               f"  {_SILU} (l)  y = Mul (s, r)"),
        ops={"SwiGlu": 1, "Split": 1},
    ),
    _rejected("CLIP's activation", _graph("s = sd_ort.QuickGelu <alpha = 1.702> (a)  y = Mul (s, b)"),
              rejection="SiLU"),
    _rejected("one factor a token", _graph(f"{_SILU} (a)  y = Mul (s, b)", up="B,S,1"), rejection="differ in shape"),
    _rejected("the SiLU is an output", _graph(f"{_SILU} (a)  y = Mul (s, b)", ", float[B,S,4] s"),
              rejection="consumers"),
    _rejected("the SiLU squared", _graph(f"{_SILU} (a)  y = Mul (s, s)"), rejection="consumers"),
]  # fmt: skip

PASS = Pass("swiglu", swiglu, CASES)


def _pack_case(name: str, body: str, rejection: str | None = None, matmuls: int = 2) -> PassCase:
    graph = f"""<ir_version: 10, opset_import: ["" : 21, "sd_ort" : 1]>
        g (float[B,S,8] x, float[B,S,8] z, float[8,4] given) => (float[B,S,4] y)
        <float[8,4] v, float[8,4] w, float[8,4] u, float[4] bias> {{ {body} }}"""
    return PassCase(name, graph, int(rejection is None), {"MatMul": matmuls}, rejection, {"B": 2, "S": 5})


_ALONE = "not a MatMul with a constant matrix and no other consumers"
PACK_CASES = [
    _pack_case("two products", "a = MatMul (x, v)  b = MatMul (x, w)  y = sd_ort.SwiGlu (a, b)", matmuls=1),
    _pack_case("two tensors", "a = MatMul (x, v)  b = MatMul (z, w)  y = sd_ort.SwiGlu (a, b)", "two tensors"),
    _pack_case("a weight that is an input", "a = MatMul (x, v)  b = MatMul (x, given)  y = sd_ort.SwiGlu (a, b)",
               _ALONE),
    _pack_case("a bias", "a = MatMul (x, v)  c = MatMul (x, w)  b = Add (c, bias)  y = sd_ort.SwiGlu (a, b)", _ALONE),
    _pack_case("a gate that is read again", "a = MatMul (x, v)  b = MatMul (x, w)  s = sd_ort.SwiGlu (a, b)"
               "  y = Sub (s, a)", _ALONE),
    _pack_case("the product squared", "a = MatMul (x, v)  y = sd_ort.SwiGlu (a, a)", _ALONE, 1),
]  # fmt: skip

PACK = Pass("pack_swiglu", pack_swiglu, PACK_CASES)
