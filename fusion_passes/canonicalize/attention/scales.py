"""Scales of attention scores: moves all of them after the MatMul of query and key, and merges them.

MatMul(q * a, kT * b) / c                     =>  MatMul(q, kT) * (a*b/c), past Reshapes and Transposes of q and kT
MatMul(v, Transpose(weights))                 =>  Transpose(MatMul(weights, Transpose(v)))
a Softmax between Casts from half precision to float32 and back  =>  the Softmax
SDPA of heads split from q * s                =>  SDPA of heads split from q, scale * s
SDPA of q * s, shared with other attentions   =>  SDPA of q, scale * s
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter.pattern import Var

from fusion_passes import DOMAIN
from fusion_passes import value_queries as values
from fusion_passes.graph_edits import unique_name
from fusion_passes.graph_pass import PassCase
from fusion_passes.rule import Rule, rule_pass


def feeds_softmax(value: ir.Value, depth: int = 4) -> bool:
    """Return whether the only consumer of a value is a Softmax, possibly behind scaling, masking and reshaping."""
    consumers = values.consumers(value)
    if depth == 0 or len(consumers) != 1 or value.is_graph_output():
        return False
    consumer = consumers[0]
    if consumer.op_type == "Softmax":
        return True
    return consumer.op_type in ("Mul", "Div", "Add", "Reshape", "Cast") and feeds_softmax(
        consumer.outputs[0], depth - 1
    )


def feeds_scores(value: ir.Value, depth: int = 4) -> bool:
    """Return whether the only consumer is the MatMul of query and key, possibly behind Reshapes and Transposes."""
    consumers = values.consumers(value)
    if depth == 0 or len(consumers) != 1 or value.is_graph_output():
        return False
    consumer = consumers[0]
    if consumer.op_type == "MatMul":
        return feeds_softmax(consumer.outputs[0])
    return consumer.op_type in ("Reshape", "Transpose") and feeds_scores(consumer.outputs[0], depth - 1)


def _scale(op: Any, scale: float, like: ir.Value, out: ir.Value) -> Any:
    """Return an initializer of one element in the dtype of the constant `like`, named after `out`."""
    constant = ir.convenience.get_const_tensor(like)
    assert constant is not None
    dtype = constant.dtype
    return op.initializer(ir.tensor(np.array(scale, dtype.numpy())), name=unique_name(out, "scale"))


class ScaledQuery(Rule):
    """MatMul(q * s, kT) => MatMul(q, kT) * s"""

    def pattern(self, op: Any, x: Any, y: Any, s: Any) -> Any:
        return op.MatMul(op.Mul(x, s), y, _outputs=["out"])

    def reject_reason(self, s: ir.Value, out: ir.Value, **_: Any) -> str | None:
        if not feeds_softmax(out):
            return "not the scores of an attention"
        return None if values.scalar(s) is not None else "the scale is not a constant scalar"

    def rewrite(self, op: Any, x: ir.Value, y: ir.Value, s: ir.Value, out: ir.Value) -> Any:
        return op.Mul(op.MatMul(x, y), _scale(op, values.scalar(s) or 0.0, s, out))


class ScaledKey(ScaledQuery):
    """MatMul(q, kT * s) => MatMul(q, kT) * s"""

    def pattern(self, op: Any, x: Any, y: Any, s: Any) -> Any:
        return op.MatMul(x, op.Mul(y, s), _outputs=["out"])


class MergeScales(Rule):
    """(x * a) * b => x * (a*b)"""

    def pattern(self, op: Any, x: Any, a: Any, b: Any) -> Any:
        return op.Mul(op.Mul(x, a), b, _outputs=["out"])

    def reject_reason(self, a: ir.Value, b: ir.Value, out: ir.Value, **_: Any) -> str | None:
        if not feeds_softmax(out):
            return "not the scores of an attention"
        return (
            None
            if values.scalar(a) is not None and values.scalar(b) is not None
            else "a scale is not a constant scalar"
        )

    def rewrite(self, op: Any, x: ir.Value, a: ir.Value, b: ir.Value, out: ir.Value) -> Any:
        return op.Mul(x, _scale(op, (values.scalar(a) or 0.0) * (values.scalar(b) or 0.0), a, out))


class DivisionIsScale(Rule):
    """scores / s => scores * (1/s)"""

    def pattern(self, op: Any, x: Any, s: Any) -> Any:
        return op.Div(x, s, _outputs=["out"])

    def reject_reason(self, s: ir.Value, out: ir.Value, **_: Any) -> str | None:
        if not values.scalar(s):
            return "the divisor is not a constant scalar"
        return None if feeds_softmax(out) or feeds_scores(out) else "not the scores of an attention"

    def rewrite(self, op: Any, x: ir.Value, s: ir.Value, out: ir.Value) -> Any:
        return op.Mul(x, _scale(op, 1 / (values.scalar(s) or math.nan), s, out))


class ScaleBehindReshape(Rule):
    """Reshape(x * s) => Reshape(x) * s, on the way to the scores"""

    def pattern(self, op: Any, x: Any, s: Any, shape: Any) -> Any:
        return op.Reshape(op.Mul(x, s, _outputs=["scaled"]), shape, _outputs=["out"])

    def reject_reason(self, x: ir.Value, s: ir.Value, scaled: ir.Value, out: ir.Value, **_: Any) -> str | None:
        if not feeds_scores(out):
            return "not on the way to the scores of an attention"
        is_number = values.scalar(s) is not None and values.same_shape(x, scaled)
        return None if is_number else "the scale is not a constant scalar"

    def rewrite(self, op: Any, x: ir.Value, s: ir.Value, shape: ir.Value, out: ir.Value, **_: Any) -> Any:
        return op.Mul(op.Reshape(x, shape), _scale(op, values.scalar(s) or 0.0, s, out))


class ScaleBehindTranspose(ScaleBehindReshape):
    """Transpose(x * s) => Transpose(x) * s, on the way to the scores"""

    def pattern(self, op: Any, x: Any, s: Any) -> Any:
        return op.Transpose(op.Mul(x, s, _outputs=["scaled"]), _outputs=["out"])

    def rewrite(self, op: Any, x: ir.Value, s: ir.Value, out: ir.Value, **_: Any) -> Any:
        return op.Mul(op.Transpose(x, perm=values.perm(out)), _scale(op, values.scalar(s) or 0.0, s, out))


class WeightsFirst(Rule):
    """MatMul(x, Transpose(weights)) => Transpose(MatMul(weights, Transpose(x))), both of the last two axes"""

    def pattern(self, op: Any, x: Any, scores: Any) -> Any:
        weights = op.Softmax(scores, _outputs=["weights"])
        return op.MatMul(x, op.Transpose(weights, _outputs=["transposed"]), _outputs=["out"])

    def reject_reason(self, x: ir.Value, weights: ir.Value, transposed: ir.Value, **_: Any) -> str | None:
        axes = values.rank(weights) or 0
        if axes < 3 or values.rank(x) != axes or values.perm(transposed) != [*range(axes - 2), axes - 1, axes - 2]:
            return "the weights are not transposed in their last two axes"
        return None

    def rewrite(self, op: Any, x: ir.Value, scores: ir.Value, weights: ir.Value, transposed: ir.Value, **_: Any) -> Any:
        node, perm = values.producer(weights), values.perm(transposed)
        again = op.Softmax(scores, axis=node.attributes.get_int("axis", -1))
        return op.Transpose(op.MatMul(again, op.Transpose(x, perm=perm)), perm=perm)


class SoftmaxInFloat32(Rule):
    """Cast(Softmax(Cast(x, float32))) => Softmax(x) for x in half precision: kernels sum in float32 in any case."""

    def pattern(self, op: Any, x: Any) -> Any:
        return op.Cast(op.Softmax(op.Cast(x, _outputs=["wide"]), _outputs=["weights"]), _outputs=["out"])

    def reject_reason(self, x: ir.Value, wide: ir.Value, out: ir.Value, **_: Any) -> str | None:
        halves = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
        if x.dtype not in halves or wide.dtype != ir.DataType.FLOAT or out.dtype != x.dtype:
            return "the Casts do not widen half precision and narrow it again"
        return None

    def rewrite(self, op: Any, x: ir.Value, weights: ir.Value, **_: Any) -> Any:
        return op.Softmax(x, axis=values.producer(weights).attributes.get_int("axis", -1))


class ScaledProjection(Rule):
    """SDPA(Transpose(Reshape(q * s)), k, v; scale) => SDPA(Transpose(Reshape(q)), k, v; scale * s)"""

    def pattern(self, op: Any, q: Any, s: Any, shape: Any, k: Any, v: Any) -> Any:
        heads = op.Transpose(op.Reshape(op.Mul(q, s, _outputs=["scaled"]), shape), _outputs=["query"])
        mask = Var("mask", can_match_none=True)
        return op.ScaledDotProductAttention(heads, k, v, mask, _domain=DOMAIN, _outputs=["out"])

    def reject_reason(self, q: ir.Value, s: ir.Value, scaled: ir.Value, **_: Any) -> str | None:
        if values.scalar(s) is None or not values.same_shape(q, scaled):
            return "the scale is not a constant scalar"
        return None

    def rewrite(
        self, op: Any, q: ir.Value, s: ir.Value, shape: ir.Value, k: ir.Value, v: ir.Value, query: ir.Value,
        out: ir.Value, mask: ir.Value | None, **_: Any,
    ) -> Any:  # fmt: skip
        node = values.producer(out)
        heads = op.Transpose(op.Reshape(q, shape), perm=values.perm(query))
        return _rescaled(op, node, heads, k, v, mask, values.scalar(s) or 0.0)


class SharedQuery(Rule):
    """SDPA(q * s, k, v; scale) => SDPA(q, k, v; scale * s)

    For a scaled query that several attentions share (an IP-Adapter's, to text and to image tokens): the rules above do
    not move such a Mul.
    """

    remove_nodes = False

    def pattern(self, op: Any, q: Any, s: Any, k: Any, v: Any) -> Any:
        mask = Var("mask", can_match_none=True)
        query = op.Mul(q, s, _outputs=["scaled"])
        return op.ScaledDotProductAttention(query, k, v, mask, _domain=DOMAIN, _outputs=["out"])

    def reject_reason(self, q: ir.Value, s: ir.Value, scaled: ir.Value, **_: Any) -> str | None:
        is_number = values.scalar(s) is not None and values.same_shape(q, scaled)
        return None if is_number else "the scale is not a constant scalar"

    def rewrite(
        self, op: Any, q: ir.Value, s: ir.Value, k: ir.Value, v: ir.Value, out: ir.Value, mask: ir.Value | None,
        **_: Any,
    ) -> Any:  # fmt: skip
        return _rescaled(op, values.producer(out), q, k, v, mask, values.scalar(s) or 0.0)


def _rescaled(
    op: Any, node: ir.Node, q: ir.Value, k: ir.Value, v: ir.Value, mask: ir.Value | None, factor: float
) -> Any:
    """Return the attention `node` with another query and its scale multiplied by `factor`."""
    attributes = {name: a.value for name, a in node.attributes.items()}
    attributes["scale"] = attributes["scale"] * factor
    inputs = [q, k, v] + ([] if mask is None else [mask])
    return op.ScaledDotProductAttention(*inputs, _domain=DOMAIN, **attributes)


RULES = (
    SoftmaxInFloat32,
    DivisionIsScale,
    ScaleBehindReshape,
    ScaleBehindTranspose,
    ScaledQuery,
    ScaledKey,
    MergeScales,
    WeightsFirst,
)
SDPA_RULES = (ScaledProjection, SharedQuery)  # for existing ScaledDotProductAttention nodes


def _graph(body: str) -> str:
    return f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[B,2,S,4] q, float[B,2,L,4] k, float[B,S,8] flat) => (float[B,2,S,L] y)
        <float a = {{0.7}}, float b = {{0.6}}, float[2,1,1] h, float[8] e, float r = {{2.0}},
         int64[4] heads = {{0, 0, 2, 4}}> {{
            kt = Transpose <perm = [0, 1, 3, 2]> (k)
            {body}
        }}"""


def _case(name: str, body: str, rewrites: int = 1, rejection: str | None = None, **ops: int) -> PassCase:
    return PassCase(name, _graph(body), rewrites, ops, rejection, sizes={"B": 2, "S": 5, "L": 3})


_FLAT = "h4 = Reshape (s, heads)  t = Transpose <perm = [0, 2, 1, 3]> (h4)  c = MatMul (t, kt)"
_END = "y = Softmax <axis = -1> (c)"
CASES = [
    _case("on the query", f"s = Mul (q, a)  c = MatMul (s, kt)  {_END}", Mul=1),
    _case("on both", f"s = Mul (q, a)  t = Mul (kt, b)  c = MatMul (s, t)  {_END}", rewrites=3, Mul=1),
    _case("a division", f"m = MatMul (q, kt)  c = Div (m, r)  {_END}", Div=0, Mul=1),
    _case(
        "on the key, before its Transpose",
        f"t = Mul (k, b)  u = Transpose <perm = [0, 1, 3, 2]> (t)  c = MatMul (q, u)  {_END}",
        rewrites=2,
        Mul=1,
    ),
    _case("on the query, before its heads are split", f"s = Mul (flat, a)  {_FLAT}  {_END}", rewrites=3, Mul=1),
    _case(
        "a scale per channel, before the heads are split", f"s = Mul (flat, e)  {_FLAT}  {_END}", 0, "constant scalar"
    ),
    _case("scale per head", f"s = Mul (q, h)  c = MatMul (s, kt)  {_END}", 0, "constant scalar"),
    _case("division by a scale per head", f"m = MatMul (q, kt)  c = Div (m, h)  {_END}", 0, "divisor"),
    _case("no attention", "s = Mul (q, a)  c = MatMul (s, kt)  y = Relu (c)", 0, "not the scores"),
    _case(
        "scores read twice", "s = Mul (q, a)  c = MatMul (s, kt)  w = Softmax (c)  y = Add (w, c)", 0, "not the scores"
    ),
]

PASS = rule_pass("attention_scales", RULES, CASES)
