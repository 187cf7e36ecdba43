"""Splits a product by the columns of its weight, so that its parts are not copied: one MatMul for each part.

    Split(MatMul(x, W) + bias?; last axis)  =>  MatMul(x, W[:, :A]) + bias[:A], MatMul(x, W[:, A:]) + bias[A:]

for targets that pack the projections of an attention and gate in one pass over both halves of a product. A block of
FLUX.2 that computes attention and MLP from one input begins with it. Runs after the operators that read a whole
product are fused. Rejected: a product or sum with other consumers; another axis; sizes or weights that are not
constant; a product of [B,C], such as a modulation, whose parts are small.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate, pairwise

import onnx_ir as ir

from fusion_passes import value_queries as values
from fusion_passes.graph_edits import new_derived_initializer, replace_value
from fusion_passes.graph_pass import Pass, PassCase, PassOutcome, Rejection


def split_product(model: ir.Model) -> PassOutcome:
    """Rewrite the Splits of `model` in place, first those of products, then those of their parts."""
    outcome = PassOutcome()
    for node in list(model.graph):
        total = node.inputs[0] if node.op_type == "Split" and not node.domain else None
        matmul, add = _product(total)
        if total is None or matmul is None:
            continue
        if reason := _reject_reason(node, matmul, add):
            outcome.rejections.append(Rejection(node, reason))
        else:
            _rewrite(model.graph, node, matmul, add)
            outcome.counts["split_product"] += 1
    return outcome


def _product(total: ir.Value | None) -> tuple[ir.Node | None, ir.Node | None]:
    """Return the MatMul that computes a value, and the Add of its bias."""
    node = None if total is None else total.producer()
    if node is None or node.domain or node.op_type not in ("MatMul", "Add"):
        return None, None
    if node.op_type == "MatMul":
        return node, None
    for value in node.inputs:
        matmul = None if value is None else value.producer()
        if matmul is not None and matmul.op_type == "MatMul" and not matmul.domain:
            return matmul, node
    return None, None


def _reject_reason(node: ir.Node, matmul: ir.Node, add: ir.Node | None) -> str | None:
    product, weight = matmul.outputs[0], matmul.inputs[1]
    if not values.last_axis(node.attributes.get_int("axis", 0), node.inputs[0]):
        return "the Split is not along the last axis"
    if not values.is_constant(weight) or values.rank(weight) != 2:
        return "its weight is not a constant matrix"
    if (values.rank(product) or 0) < 3:
        return "the product is not of tokens"
    if add is not None and not values.is_vector(_bias(add, product), values.size(weight, 1)):
        return "its bias is not a constant vector"
    if any(len(list(each.uses())) != 1 or each.is_graph_output() for each in (product, *(add.outputs if add else ()))):
        return "the product has other consumers"
    if any(values.size(part, -1) is None for part in node.outputs):
        return "a size is unknown"
    return "a part is an output" if any(part.is_graph_output() for part in node.outputs) else None


def _bias(add: ir.Node, product: ir.Value) -> ir.Value | None:
    return next((each for each in add.inputs if each is not product), None)


def _rewrite(graph: ir.Graph, node: ir.Node, matmul: ir.Node, add: ir.Node | None) -> None:
    x, weight = matmul.inputs
    assert weight is not None
    bias = None if add is None else _bias(add, matmul.outputs[0])
    rows, sizes = values.size(weight, 0) or 0, [values.size(part, -1) or 0 for part in node.outputs]
    for index, span in enumerate(pairwise(accumulate(sizes, initial=0))):
        part, size = node.outputs[index], sizes[index]
        name = f"{matmul.outputs[0].name}.columns{index}"
        columns = new_derived_initializer(graph, f"{name}_weight", [weight], [rows, size], "columns", list(span))
        new = ir.node("MatMul", [x, columns])
        if bias is not None:
            new.outputs[0].name, new.outputs[0].type, new.outputs[0].shape = name, part.type, part.shape
            addend = new_derived_initializer(graph, f"{name}_bias", [bias], [size], "rows", list(span))
            graph.insert_before(node, new)
            new = ir.node("Add", [new.outputs[0], addend])
        new.metadata_props.update(matmul.metadata_props)
        replace_value(graph, node, new, part)
    for old in (node, *((add,) if add is not None else ()), matmul):
        graph.remove(old, safe=True)


def _graph(body: str, outputs: str = "", sizes: str = "2, 4, 3", bias: str = "9") -> str:
    return f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[B,S,5] x, float[B,5] v, float[5,9] given) => (float[B,S,4] y {outputs})
        <float[5,9] w, float[{bias}] bias, int64[3] sizes = {{{sizes}}}> {{ {body} }}"""


_SPLIT = "a, b, c = Split <axis = -1> (m, sizes)"
_case = partial(PassCase, sizes={"B": 2, "S": 6}, ops={"MatMul": 3, "Split": 0})
_rejected = partial(PassCase, sizes={"B": 2, "S": 6}, rewrites=0, ops={"Split": 1})
CASES = [
    _case("no bias", _graph(f"m = MatMul (x, w)  {_SPLIT}  e = Concat <axis = 2> (a, a)  f = Sub (e, b)"
                            "  h = ReduceMean <keepdims = 1> (c)  y = Add (f, h)")),
    _case("a bias", _graph(f"p = MatMul (x, w)  m = Add (bias, p)  {_SPLIT.replace('-1', '2')}"
                           "  e = Concat <axis = 2> (a, a)  f = Sub (e, b)  h = ReduceMean <keepdims = 1> (c)"
                           "  y = Add (f, h)"), ops={"MatMul": 3, "Split": 0, "Add": 4}),
    PassCase(
        "a part of a part",
        _graph(f"m = MatMul (x, w)  {_SPLIT}  l, r = Split <axis = 2, num_outputs = 2> (b)"
               "  y = Concat <axis = 2> (a, r)"),
        2, {"MatMul": 4, "Split": 0}, sizes={"B": 2, "S": 6},
    ),
    _rejected("the product is read again", _graph(f"m = MatMul (x, w)  {_SPLIT}  y = Identity (b)", ", float[B,S,9] m"),
              rejection="other consumers"),
    _rejected("a weight that is an input", _graph(f"m = MatMul (x, given)  {_SPLIT}  y = Identity (b)"),
              rejection="constant matrix"),
    _rejected("one bias for all columns", _graph(f"p = MatMul (x, w)  m = Add (p, bias)  {_SPLIT}  y = Identity (b)",
                                                 bias="1"), rejection="constant vector"),
    _rejected("a modulation", _graph(f"m = MatMul (v, w)  {_SPLIT}  e = MatMul (x, w)  f = ReduceMean (e)"
                                     "  h = Add (b, f)  one = Constant <value_ints = [1]> ()  k = Unsqueeze (h, one)"
                                     "  n = ReduceMean <keepdims = 1> (x)  y = Add (k, n)")
              .replace("B,S,4] y", "B,1,4] y"),
              rejection="not of tokens"),
    _rejected("tokens", _graph("m = MatMul (x, w)  a, b = Split <axis = 1, num_outputs = 2> (m)"
                               "  c = Add (a, b)  d = Concat <axis = 1> (c, c)"
                               "  y = Slice (d, zero, four, last)").replace("int64[3] sizes", "int64[1] zero = {0}, "
                               "int64[1] four = {4}, int64[1] last = {2}, int64[3] sizes"),
              rejection="last axis"),
    _rejected("a part is an output", _graph(f"m = MatMul (x, w)  {_SPLIT}  y = Identity (b)", ", float[B,S,2] a"),
              rejection="is an output"),
]  # fmt: skip

PASS = Pass("split_product", split_product, CASES)
