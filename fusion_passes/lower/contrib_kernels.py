"""Lowers pairs of operators to contrib kernels of ONNX Runtime's CPU provider.

    Gelu(x + bias)                                             =>  BiasGelu(x, bias)
    x + skip -> s -> RMSNormalization(gamma) -> y              =>  SkipSimplifiedLayerNormalization(x, skip, gamma)
    MultiHeadAttention(q + bq, k + bk, v + bv, -, -, mask?)    =>  MultiHeadAttention(q, k, v, [bq, bk, bv], -, mask?)
    MultiHeadAttention(*Split(x + b), -, -, mask?)             =>  MultiHeadAttention(*Split(x), b, -, mask?)
    MultiHeadAttention(x @ wq, x @ wk, x @ wv, b, -, mask?)    =>  Attention(x, [wq, wk, wv], b, -, -, mask?)
    MultiHeadAttention(*Split(x @ w), b, -, mask?)             =>  Attention(x, w, b, -, -, mask?)

Each takes 0.97 to 0.98 of the time of the pair, at the sizes of ViT-B on ONNX Runtime 1.31; Attention takes 0.86 to
0.99 of that of MatMul and MultiHeadAttention. Rejected: Gelu by tanh, biases and gamma that are not constant vectors
over the last axis, a skip of another shape, sums and products with other consumers, attention without a bias (ONNX
Runtime's kernel crashes without one).
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from fusion_passes import CONTRIB, DOMAIN
from fusion_passes import value_queries as values
from fusion_passes.cleanup import remove_unused
from fusion_passes.graph_edits import new_derived_initializer
from fusion_passes.graph_pass import Pass, PassOutcome, case_makers, rewrite_nodes
from fusion_passes.rule import Rule, rule_pass


class BiasGelu(Rule):
    """Gelu(x + bias) => BiasGelu"""

    def pattern(self, op: Any, x: Any, bias: Any) -> Any:
        return op.Gelu(op.Add(x, bias), _outputs=["out"])

    def reject_reason(self, x: ir.Value, bias: ir.Value, out: ir.Value) -> str | None:
        if values.producer(out).attributes.get_string("approximate", "none") != "none":
            return "Gelu is approximated by tanh"
        vector = values.is_vector(bias, values.size(x, -1)) and x.dtype == bias.dtype == ir.DataType.FLOAT
        return None if vector else "the bias is not a constant vector over the last axis"

    def rewrite(self, op: Any, x: ir.Value, bias: ir.Value, **_: Any) -> Any:
        return op.BiasGelu(x, bias, _domain=CONTRIB)


class SkipRMSNormalization(Rule):
    """x + skip -> RMSNormalization => SkipSimplifiedLayerNormalization"""

    def pattern(self, op: Any, x: Any, skip: Any, gamma: Any) -> Any:
        total = op.Add(x, skip, _outputs=["total"])
        return op.RMSNormalization(total, gamma, _outputs=["normal"]), total

    def reject_reason(
        self, x: ir.Value, skip: ir.Value, gamma: ir.Value, total: ir.Value, normal: ir.Value
    ) -> str | None:
        node = values.producer(normal)
        if values.rank(total) != 3 or not values.last_axis(node.attributes.get_int("axis", -1), total):
            return "not over the last axis of [B,S,C]"
        if not (values.same_shape(x, total) and values.same_shape(skip, total)):
            return "input and skip differ in shape"
        vector = values.is_vector(gamma, values.size(total, -1)) and total.dtype == gamma.dtype == ir.DataType.FLOAT
        return None if vector else "gamma is not a constant vector over the last axis"

    def rewrite(self, op: Any, x: ir.Value, skip: ir.Value, gamma: ir.Value, normal: ir.Value, **_: Any) -> Any:
        epsilon = values.producer(normal).attributes.get_float("epsilon", 1e-5)
        y, _, _, total = op.SkipSimplifiedLayerNormalization(
            x, skip, gamma, epsilon=epsilon, _domain=CONTRIB, _outputs=4
        )
        return y, total


_RULES = rule_pass("contrib_kernels", (BiasGelu, SkipRMSNormalization), ())


def _biased(value: ir.Value | None) -> tuple[ir.Value, ir.Value] | None:
    """Return (x, bias) of the Add of a constant vector that computes `value` for one consumer, or None."""
    node = None if value is None else value.producer()
    if node is None or value is None or node.op_type != "Add" or node.domain or value.is_graph_output():
        return None
    x, bias = node.inputs
    if len(value.uses()) != 1 or x is None or bias is None or bias.dtype != ir.DataType.FLOAT:
        return None
    return (x, bias) if values.is_vector(bias, values.size(value, -1)) else None


def _split(node: ir.Node) -> ir.Node | None:
    """Return the Split along the last axis whose outputs are query, key and value of an attention, or None."""
    query = node.inputs[0]
    split = None if query is None else query.producer()
    if split is None or split.op_type != "Split" or list(split.outputs) != list(node.inputs[:3]):
        return None
    is_last = values.last_axis(split.attributes.get_int("axis", 0), split.inputs[0])
    return split if is_last and all(map(values.has_one_use, split.outputs)) else None


def _reject_reason(node: ir.Node) -> str | None:
    if node.domain != DOMAIN or len(node.inputs) < 3 or node.inputs[2] is None:
        return "its inputs are packed"
    if len(node.inputs) > 3 and node.inputs[3] is not None:
        return "it has a bias"
    split = _split(node)
    biased = [_biased(value) for value in (node.inputs[:3] if split is None else split.inputs[:1])]
    widths = {values.size(value, -1) for value in node.inputs[:3]}
    return None if all(biased) and len(widths) == 1 else "query, key and value are no sums with vectors of one size"


def _rewrite(graph: ir.Graph, node: ir.Node) -> None:
    owner = _split(node) or node
    sums = [pair for value in owner.inputs[: 3 if owner is node else 1] if (pair := _biased(value)) is not None]
    for index, (x, _) in enumerate(sums):
        owner.replace_input_with(index, x)
    bias = sums[0][1]
    if owner is node:
        width = sum(values.size(b, 0) or 0 for _, b in sums)
        name = f"{node.outputs[0].name}.biases"
        bias = new_derived_initializer(graph, name, [b for _, b in sums], [width], "concat")
    node.resize_inputs(max(4, len(node.inputs)))
    node.replace_input_with(3, bias)


def _projections(node: ir.Node) -> tuple[ir.Value, list[ir.Value]] | None:
    """Return x and the constant matrices [C,N] of MatMul(x, matrix), the query, key and value of an attention.

    One matrix of them side by side if these are outputs of a Split. None for other queries, keys and values.
    """
    split = _split(node)
    products = [v.producer() for v in (node.inputs[:3] if split is None else split.inputs[:1]) if v is not None]
    sources, matrices = [], []
    for product in products:
        if product is None or product.op_type != "MatMul" or product.domain or len(product.outputs[0].uses()) != 1:
            return None
        x, matrix = product.inputs
        if x is None or matrix is None or product.outputs[0].is_graph_output() or not values.is_constant(matrix):
            return None
        if values.rank(x) != 3 or values.rank(matrix) != 2 or matrix.dtype != ir.DataType.FLOAT:
            return None
        sources.append(x)
        matrices.append(matrix)
    same = sources.count(sources[0]) == len(sources) and len({tuple(values.dims(m) or ()) for m in matrices}) == 1
    return (sources[0], matrices) if same else None


def _why_not_projected(node: ir.Node) -> str | None:
    if node.domain != DOMAIN or len(node.inputs) < 4 or node.inputs[2] is None or node.inputs[3] is None:
        return "it has no bias"
    return None if _projections(node) else "query, key and value are no products of one tensor and constant matrices"


def _project(graph: ir.Graph, node: ir.Node) -> None:
    projections = _projections(node)
    assert projections is not None
    x, matrices = projections
    matrix = matrices[0]
    if len(matrices) == 3:  # side by side: those of one head
        rows, width = (values.size(matrix, axis) or 0 for axis in (0, 1))
        name = f"{node.outputs[0].name}.projections"
        matrix = new_derived_initializer(graph, name, matrices, [rows, 3 * width], "interleave", 1)
    mask = node.inputs[5] if len(node.inputs) > 5 else None
    node.op_type, node.domain = "Attention", CONTRIB
    inputs = [x, matrix, node.inputs[3], *([None, None, mask] if mask is not None else [])]
    node.resize_inputs(len(inputs))
    for index, value in enumerate(inputs):
        node.replace_input_with(index, value)


def contrib_kernels(model: ir.Model) -> PassOutcome:
    """Rewrite the pairs of `model` in place."""
    outcome = rewrite_nodes(model, "contrib_kernels", "MultiHeadAttention", _reject_reason, _rewrite)
    remove_unused(model.graph)
    outcome += rewrite_nodes(model, "contrib_kernels", "MultiHeadAttention", _why_not_projected, _project)
    remove_unused(model.graph)
    outcome += _RULES.run(model)
    if outcome.counts.total():
        model.graph.opset_imports.setdefault(CONTRIB, 1)
    return outcome


_INPUTS, _ROW = "float[B,S,8] x, float[B,S,8] k", "float[B,5,8] x, float[B,5,8] k"


def _graph(body: str, inputs: str = _INPUTS, outputs: str = "", weights: str = "") -> str:
    return f"""<ir_version: 10, opset_import: ["" : 23, "sd_ort" : 1]>
        g ({inputs}) => (float[B,S,8] y {outputs})
        <float[8] b, float[8] c, float[8] d, float[1] one, float[24] wide, float[8,8] w, float[8,8] w2,
         float[8,8] w3, float[8,24] packed
         {weights}> {{
            {body}
        }}"""


_ATTENTION = "sd_ort.MultiHeadAttention <num_heads = 2, scale = 0.4, unidirectional = 0>"
_QKV = "q = MatMul (x, w)  p = MatMul (k, w)  v = Tanh (k)  "
_SELF = "q = MatMul (x, w)  p = MatMul (x, w2)  v = MatMul (x, w3)  "
_SUMS = "qb = Add (q, b)  kb = Add (p, c)  vb = Add (v, d)  "
_PACKED = "m = MatMul (x, packed)  s = Add (m, wide)  q, p, v = Split <axis = -1, num_outputs = 3> (s)  "
_NORM = "s = Add (x, k)  y = RMSNormalization <epsilon = 0.01> (s, b)  z = Relu (s)"
_Z = ", float[B,S,8] z"
_case, _rejected = case_makers({"B": 2, "S": 5})
CASES = [
    _case("Gelu of a bias", _graph("a = Add (x, b)  y = Gelu (a)"), ops={"BiasGelu": 1, "Add": 0}),
    _rejected("Gelu by tanh", _graph('a = Add (x, b)  y = Gelu <approximate = "tanh"> (a)'), rejection="tanh"),
    _rejected("one bias for all channels", _graph("a = Add (x, one)  y = Gelu (a)"), rejection="not a constant vector"),
    _rejected("Gelu of two activations", _graph("a = Add (x, k)  y = Gelu (a)"), rejection="not a constant vector"),
    _rejected("the sum is an output", _graph("a = Add (x, b)  y = Gelu (a)", outputs=", float[B,S,8] a")),
    _case("RMS norm of a sum", _graph(_NORM, outputs=_Z), ops={"SkipSimplifiedLayerNormalization": 1, "Add": 0}),
    _rejected("skip of one row", _graph(_NORM, "float[B,S,8] x, float[1,1,8] k", _Z), rejection="differ in shape"),
    _rejected(
        "over two axes",
        _graph(_NORM.replace("<eps", "<axis = 1, eps").replace("(s, b)", "(s, rows)"), _ROW, _Z, ", float[5,8] rows")
        .replace("[B,S,8] y", "[B,5,8] y"),
        rejection="not over the last axis",
    ),
    _case("attention of three sums", _graph(f"{_QKV}{_SUMS}y = {_ATTENTION} (qb, kb, vb)"), ops={"Add": 0}),
    _case(
        "attention of a split sum",
        _graph(f"{_PACKED}y = {_ATTENTION} (q, p, v)"),
        2,
        ops={"Add": 0, "Split": 0, "MatMul": 0, "Attention": 1},
    ),
    _case(
        "self-attention",
        _graph(f"{_SELF}{_SUMS}y = {_ATTENTION} (qb, kb, vb)"),
        2,
        ops={"Add": 0, "MatMul": 0, "Attention": 1},
    ),
    _case(
        "causal self-attention with a mask",
        _graph(
            f"{_SELF}{_SUMS}y = {_ATTENTION.replace('unidirectional = 0', 'unidirectional = 1')} (qb, kb, vb, , , a)",
            f"{_INPUTS}, float[B,1,S,S] a",
        ),
        2,
        ops={"Add": 0, "MatMul": 0, "Attention": 1},
    ),
    _case(
        "a product that is an output",
        _graph(f"{_SELF}{_SUMS}y = {_ATTENTION} (qb, kb, vb)", outputs=", float[B,S,8] v"),
        ops={"Add": 0, "MatMul": 3},
    ),
    _case(
        "a matrix that is an input",
        _graph(f"{_SELF.replace('w2', 'u')}{_SUMS}y = {_ATTENTION} (qb, kb, vb)", f"{_INPUTS}, float[8,8] u"),
        ops={"Add": 0, "MatMul": 3},
    ),
    _case(
        "keys of another tensor",
        _graph(f"{_SELF.replace('(x, w2)', '(k, w2)')}{_SUMS}y = {_ATTENTION} (qb, kb, vb)"),
        ops={"Add": 0, "MatMul": 3},
    ),
    _case(
        "attention with a mask",
        _graph(f"{_QKV}{_SUMS}y = {_ATTENTION} (qb, kb, vb, , , a)", f"{_INPUTS}, float[1,1,S,S] a"),
        ops={"Add": 0},
    ),
    _rejected("a key without bias", _graph(f"{_QKV}{_SUMS}y = {_ATTENTION} (qb, p, vb)"), rejection="no sums"),
    _rejected(
        "a biased key that is read again",
        _graph(f"{_QKV}{_SUMS}y = {_ATTENTION} (qb, kb, vb)  z = Neg (kb)", outputs=_Z),
        rejection="no sums",
    ),
    _rejected(
        "query and key exchanged behind a split", _graph(f"{_PACKED}y = {_ATTENTION} (p, q, v)"), rejection="no sums"
    ),
]  # fmt: skip

PASS = Pass("contrib_kernels", contrib_kernels, CASES)
