"""Splits the product of concatenated tensors, so that they are not copied: the products of a parallel block.

    MatMul(Concat(a, b; last axis), W) + bias  =>  LinearAdd(b, W[A:], -, LinearAdd(a, W[:A], bias))

for targets with LinearAdd, whose GEMM adds the first product in its epilogue. A block of FLUX that computes attention
and MLP from one input ends with it. Rejected: a concatenation with other consumers, or of another axis or unknown
widths; weights that are not constant matrices; a product wider than its input, whose partial sums cost more than the
copies.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate, pairwise

import onnx_ir as ir

from fusion_passes import DOMAIN
from fusion_passes import value_queries as values
from fusion_passes.graph_edits import new_derived_initializer, replace_value
from fusion_passes.graph_pass import Pass, PassCase, PassOutcome, Rejection


def split_concat(model: ir.Model) -> PassOutcome:
    """Rewrite the products of `model` in place."""
    outcome = PassOutcome()
    for node in list(model.graph):
        concat = node.inputs[0].producer() if node.op_type == "MatMul" and node.inputs[0] is not None else None
        if concat is None or concat.op_type != "Concat" or concat.domain:
            continue
        if reason := _reject_reason(node, concat):
            outcome.rejections.append(Rejection(node, reason))
        else:
            _rewrite(model.graph, node, concat)
            outcome.counts["split_concat"] += 1
    return outcome


def _reject_reason(node: ir.Node, concat: ir.Node) -> str | None:
    joined, weight = concat.outputs[0], node.inputs[1]
    if len(list(joined.uses())) != 1 or joined.is_graph_output():
        return "the concatenation has other consumers"
    if not values.last_axis(concat.attributes["axis"].as_int(), joined):
        return "the concatenation is not along the last axis"
    widths = [values.size(part, -1) for part in concat.inputs]
    if None in widths or (values.rank(joined) or 0) < 2:
        return "a width is unknown"
    if not values.is_constant(weight) or values.rank(weight) != 2:
        return "its weight is not a constant matrix"
    columns = values.size(weight, 1) or 0
    return "the product is wider than its input" if columns > sum(width or 0 for width in widths) else None


def _rewrite(graph: ir.Graph, node: ir.Node, concat: ir.Node) -> None:
    product, weight = node.outputs[0], values.operand(node, 1)
    columns = values.size(weight, 1) or 0
    consumers = values.consumers(product)
    add = consumers[0] if len(list(product.uses())) == 1 and not product.is_graph_output() else None
    bias = None
    if add is not None and add.op_type == "Add" and not add.domain:
        bias = next((each for each in add.inputs if each is not product and values.is_vector(each, columns)), None)
    last = add if add is not None and bias is not None else node
    spans = pairwise(accumulate((values.size(part, -1) or 0 for part in concat.inputs), initial=0))
    total: ir.Value | None = None
    for index, (part, span) in enumerate(zip(concat.inputs, spans, strict=True)):
        name = f"{product.name}.part{index}"
        shape = [span[1] - span[0], columns]
        rows = new_derived_initializer(graph, f"{name}_weight", [weight], shape, "rows", list(span))
        inputs = [part, rows, bias] if index == 0 else [part, rows, None, total]
        new = ir.node("LinearAdd", inputs[:2] if inputs[2:] == [None] else inputs, domain=DOMAIN)
        new.metadata_props.update(node.metadata_props)
        if index == len(concat.inputs) - 1:
            replace_value(graph, last, new, last.outputs[0])
            break
        total = new.outputs[0]
        total.name, total.type, total.shape = name, product.type, product.shape
        graph.insert_before(last, new)
    for old in (*((last,) if last is not node else ()), node, concat):
        graph.remove(old, safe=True)


def _graph(body: str, outputs: str = "", width: int = 7) -> str:
    return f"""<ir_version: 10, opset_import: ["" : 23]>
        g (float[B,S,4] a, float[B,S,5] b, float[B,S,9] c, float[9,{width}] given) => (float[B,S,{width}] y {outputs})
        <float[9,{width}] w, float[{width}] bias, float[14,{width}] v, float[5,{width}] u> {{ {body} }}"""


_case = partial(PassCase, sizes={"B": 2, "S": 6}, ops={"LinearAdd": 2, "MatMul": 0, "Concat": 0, "Add": 0})
_rejected = partial(PassCase, sizes={"B": 2, "S": 6}, rewrites=0, ops={"LinearAdd": 0, "MatMul": 1, "Concat": 1})
_JOIN = "j = Concat <axis = 2> (a, b)"
CASES = [
    _case("a bias", _graph(f"{_JOIN}  m = MatMul (j, w)  y = Add (bias, m)")),
    _case("no bias", _graph("j = Concat <axis = -1> (a, b)  y = MatMul (j, w)")),
    _case(
        "three parts",
        _graph("j = Concat <axis = 2> (b, a, b)  m = MatMul (j, v)  y = Add (m, bias)"),
        ops={"LinearAdd": 3, "MatMul": 0, "Concat": 0},
    ),
    _case(
        "a sum that is no bias",
        _graph(f"{_JOIN}  m = MatMul (j, w)  r = MatMul (b, u)  y = Add (m, r)"),
        ops={"LinearAdd": 2, "MatMul": 1, "Add": 1},
    ),
    _rejected("read again", _graph(f"{_JOIN}  y = MatMul (j, w)", ", float[B,S,9] j"), rejection="other consumers"),
    _rejected("a weight that is an input", _graph(f"{_JOIN}  y = MatMul (j, given)"), rejection="constant matrix"),
    _rejected("a wide product", _graph(f"{_JOIN}  y = MatMul (j, w)", width=10), rejection="wider"),
    _rejected(
        "tokens",
        _graph("j = Concat <axis = 1> (c, c)  m = MatMul (j, w)  y, z = Split <axis = 1, num_outputs = 2> (m)"),
        rejection="last axis",
    ),
]

PASS = Pass("split_concat", split_concat, CASES)
