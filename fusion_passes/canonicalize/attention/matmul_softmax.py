"""Attention as MatMul, Softmax and MatMul on [B,H,S,D] tensors.

    MatMul(Softmax(MatMul(q, kT) * s + m), v)     =>  SDPA(q, Transpose(kT), v, m; scale=s)
    MatMul(Softmax(Tanh(MatMul(q, kT) * s) * c + m), v)  =>  SDPA(..; scale=s*c, softcap=c), as Gemma 2 caps its scores
    Where(IsNaN(p), 0, p) after the Softmax       =>  removed if the mask is finite, because no row of p is NaN then

The mask becomes an input, the scale an attribute. Rejected: a Softmax on another axis, a mask that may be infinite
together with a NaN guard, other consumers of the probabilities.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.pattern import OrValue

from fusion_passes import DOMAIN
from fusion_passes import value_queries as values
from fusion_passes.canonicalize.attention.masks import batch_mismatch, is_finite_mask, mask_mismatch
from fusion_passes.graph_pass import case_makers
from fusion_passes.rule import Rule


class Sdpa(Rule):
    """MatMul(Softmax(MatMul(q, kT) * s + m), v) => SDPA; s, m and the NaN guard are optional."""

    def pattern(self, op: Any, q: Any, k_t: Any, v: Any, s: Any, mask: Any, zero: Any) -> Any:
        scores = op.MatMul(q, k_t)
        scaled = OrValue([op.Mul(scores, s), scores])
        masked = OrValue([op.Add(scaled, mask), op.Add(mask, scaled), scaled])
        weights = op.Softmax(masked, _outputs=["weights"])
        guarded = OrValue([op.Where(op.IsNaN(weights, _outputs=["nan"]), zero, weights), weights])
        return op.MatMul(guarded, v, _outputs=["out"])

    def reject_reason(
        self, q: ir.Value, k_t: ir.Value, v: ir.Value, s: ir.Value | None, mask: ir.Value | None,
        zero: ir.Value | None, weights: ir.Value, out: ir.Value | None = None, **_: Any,
    ) -> str | None:  # fmt: skip
        if not values.last_axis(values.producer(weights).attributes.get_int("axis", -1), weights):
            return "the Softmax is not over the last axis"
        shapes = [values.dims(x) or [] for x in (q, k_t, v)]
        if any(len(d) != 4 for d in shapes):
            return "query, key and value are not all 4-D"
        if not isinstance(shapes[0][-1], int):
            return "the head size is unknown"
        if s is not None and values.scalar(s) is None:
            return "the scale is not a constant scalar"
        if reason := batch_mismatch(*shapes):
            return reason
        if mask is not None and (reason := mask_mismatch(mask, q, shapes[1][3], v)):
            return reason
        if zero is not None and values.scalar(zero) != 0:
            return "NaN rows are not replaced by 0"
        if zero is not None and mask is not None and not is_finite_mask(mask):
            return "rows of the mask may be all -infinity, which the NaN guard turns into zeros"
        return None

    def rewrite(
        self, op: Any, q: ir.Value, k_t: ir.Value, v: ir.Value, s: ir.Value | None, mask: ir.Value | None, **_: Any
    ) -> Any:  # fmt: skip
        inputs = [q, op.Transpose(k_t, perm=[0, 1, 3, 2]), v] + ([] if mask is None else [mask])
        scale = 1.0 if s is None else values.scalar(s)
        return op.ScaledDotProductAttention(*inputs, scale=scale, is_causal=0, _domain=DOMAIN)


class CappedSdpa(Sdpa):
    """MatMul(Softmax(Tanh(MatMul(q, kT) * s / d) * c + m), v) => SDPA with capped scores"""

    def pattern(self, op: Any, q: Any, k_t: Any, v: Any, s: Any, d: Any, c: Any, mask: Any) -> Any:
        scores = op.MatMul(q, k_t)
        scaled = OrValue([op.Div(op.Mul(scores, s), d), op.Mul(scores, s), op.Div(scores, d), scores])
        capped = op.Mul(op.Tanh(scaled), c)
        masked = OrValue([op.Add(capped, mask), op.Add(mask, capped), capped])
        return op.MatMul(op.Softmax(masked, _outputs=["weights"]), v, _outputs=["out"])

    def reject_reason(
        self, d: ir.Value | None, c: ir.Value, zero: ir.Value | None = None, **bindings: Any
    ) -> str | None:
        if any(x is not None and not (values.scalar(x) or 0.0) > 0 for x in (d, c)):
            return "the cap is not a constant positive scalar"
        return super().reject_reason(zero=zero, **bindings)

    def rewrite(
        self, op: Any, q: ir.Value, k_t: ir.Value, v: ir.Value, s: ir.Value | None, d: ir.Value | None, c: ir.Value,
        mask: ir.Value | None, **_: Any,
    ) -> Any:  # fmt: skip
        inputs = [q, op.Transpose(k_t, perm=[0, 1, 3, 2]), v] + ([] if mask is None else [mask])
        factor, divisor = (1.0 if x is None else values.scalar(x) or 0.0 for x in (s, d))
        cap = values.scalar(c) or 0.0
        scale = factor / divisor * cap
        return op.ScaledDotProductAttention(*inputs, scale=scale, is_causal=0, softcap=cap, _domain=DOMAIN)


RULES = (Sdpa, CappedSdpa)


def case_graph(body: str, extra: str = "", outputs: str = "", opset: int = 21) -> str:
    """Return the text of a model of one attention, with transposed keys kt and constants."""
    return f"""<ir_version: 10, opset_import: ["" : {opset}]>
        g (float[B,2,S,4] q, float[B,2,L,4] k, float[B,2,L,4] v {extra}) => (float[B,2,S,4] y {outputs})
        <float a = {{0.7}}, float b = {{0.6}}, float z = {{0.0}}, float low = {{-3.0e38}}, float r = {{2.0}}> {{
            kt = Transpose <perm = [0, 1, 3, 2]> (k)
            {body}
        }}"""


_PLAIN = "c = MatMul (q, kt)  d = Mul (c, a)  w = Softmax <axis = -1> (d)  y = MatMul (w, v)"
_GUARD = "n = IsNaN (w)  u = Where (n, z, w)  y = MatMul (u, v)"
_SIZES = {"B": 2, "S": 5, "L": 3}
_ONE = {"ScaledDotProductAttention": 1, "Softmax": 0, "MatMul": 0}
_case, _rejected = case_makers(_SIZES)
CASES = [
    _case("scale after the product", case_graph(_PLAIN), ops=_ONE),
    _case("no scale", case_graph("c = MatMul (q, kt)  w = Softmax <axis = 3> (c)  y = MatMul (w, v)"), ops=_ONE),
    _case(
        "scales on query and key",
        case_graph(
            "qs = Mul (q, a)  ks = Mul (kt, b)  c = MatMul (qs, ks)  w = Softmax <axis = -1> (c)  y = MatMul (w, v)"
        ),
        ops=_ONE | {"Mul": 0},
    ),
    _case(
        "divided scores and a mask",
        case_graph(
            "c = MatMul (q, kt)  d = Div (c, r)  e = Add (d, m)  w = Softmax <axis = -1> (e)  y = MatMul (w, v)",
            ", float[B,1,S,L] m",
        ),
        ops=_ONE | {"Add": 0},
    ),
    _case(
        "finite mask behind a NaN guard",
        case_graph(
            "m = Where (keep, z, low)  c = MatMul (q, kt)  d = Mul (c, a)  e = Add (d, m)  w = Softmax <axis = -1> (e) "
            + _GUARD,
            ", bool[B,1,S,L] keep",
        ),
        ops=_ONE | {"IsNaN": 0},
    ),
    _rejected(
        "mask that may be infinite behind a NaN guard",
        case_graph(
            "c = MatMul (q, kt)  d = Mul (c, a)  e = Add (d, m)  w = Softmax <axis = -1> (e) " + _GUARD,
            ", float[B,1,S,L] m",
        ),
        rejection="-infinity",
    ),
    _case(
        "mask a key, broadcast",
        case_graph(
            "c = MatMul (q, kt)  d = Mul (c, a)  e = Add (m, d)  w = Softmax <axis = -1> (e)  y = MatMul (w, v)",
            ", float[B,1,1,L] m",
        ),
        ops=_ONE | {"Add": 0},
    ),
    _rejected(
        "mask that enlarges the batch",
        """<ir_version: 10, opset_import: ["" : 21]>
        g (float[1,2,S,4] q, float[1,2,L,4] k, float[1,2,L,4] v, float[B,1,S,L] m) => (float[B,2,S,4] y) {
            kt = Transpose <perm = [0, 1, 3, 2]> (k)
            c = MatMul (q, kt)  e = Add (c, m)  w = Softmax <axis = -1> (e)  y = MatMul (w, v)
        }""",
        rejection="the mask's axes",
    ),
    _rejected(
        "mask of another size",
        case_graph(
            "c = MatMul (q, kt)  e = Add (c, m)  w = Softmax <axis = -1> (e)  y = MatMul (w, v)", ", float[M,3] m"
        ),
        rejection="the mask's axes",
        sizes=_SIZES | {"M": 5},
    ),
    _rejected(
        "keys of one batch for all queries",
        """<ir_version: 10, opset_import: ["" : 21]>
        g (float[B,2,S,4] q, float[1,2,L,4] k, float[1,2,L,4] v) => (float[B,2,S,4] y) {
            kt = Transpose <perm = [0, 1, 3, 2]> (k)
            c = MatMul (q, kt)  w = Softmax <axis = -1> (c)  y = MatMul (w, v)
        }""",
        rejection="differ in batch",
    ),
    _rejected(
        "one key head for all query heads",
        """<ir_version: 10, opset_import: ["" : 21]>
        g (float[B,4,S,4] q, float[B,1,L,4] k, float[B,1,L,4] v) => (float[B,4,S,4] y) {
            kt = Transpose <perm = [0, 1, 3, 2]> (k)
            c = MatMul (q, kt)  w = Softmax <axis = -1> (c)  y = MatMul (w, v)
        }""",
        rejection="differ in batch or heads",
    ),
    _rejected(
        "finite mask that the cast to half makes infinite, behind a NaN guard",
        """<ir_version: 10, opset_import: ["" : 21]>
        g (float16[B,2,S,4] q, float16[B,2,L,4] k, float16[B,2,L,4] v, bool[B,1,S,L] keep) => (float16[B,2,S,4] y)
        <float one = {0.0}, float low = {-3.0e38}, float zero = {0.0}> {
            z = Cast <to = 10> (zero)
            kt = Transpose <perm = [0, 1, 3, 2]> (k)
            m32 = Where (keep, one, low)  m = Cast <to = 10> (m32)
            c = MatMul (q, kt)  e = Add (c, m)  w = Softmax <axis = -1> (e)
            n = IsNaN (w)  u = Where (n, z, w)  y = MatMul (u, v)
        }""",
        rejection="-infinity",
    ),
    _rejected(
        "NaN rows replaced by ones",
        case_graph(_PLAIN.split("  y =")[0] + "  n = IsNaN (w)  u = Where (n, r, w)  y = MatMul (u, v)"),
        rejection="not replaced by 0",
    ),
    _rejected(
        "softmax over the keys of a transposed product",
        case_graph(
            "c = MatMul (q, kt)  t = Transpose <perm = [0, 1, 3, 2]> (c)  w = Softmax <axis = -1> (t) "
            " b2 = Transpose <perm = [0, 1, 3, 2]> (w)  y = MatMul (b2, v)"
        ),
    ),
    _case(
        "capped scores and a mask, as in Gemma 2",
        case_graph(
            "c = MatMul (q, kt)  d = Mul (c, a)  f = Div (d, r)  t = Tanh (f)  u = Mul (t, r)  e = Add (u, m)"
            "  w = Softmax <axis = -1> (e)  y = MatMul (w, v)",
            ", float[B,1,S,L] m",
        ),
        ops=_ONE | {"Tanh": 0, "Div": 0, "Add": 0, "Mul": 0},
    ),
    _case(
        "scores capped by another number than they are divided by",
        case_graph(
            "c = MatMul (q, kt)  f = Div (c, b)  t = Tanh (f)  u = Mul (t, r)  w = Softmax <axis = -1> (u)"
            "  y = MatMul (w, v)"
        ),
        ops=_ONE | {"Tanh": 0, "Div": 0, "Mul": 0},
    ),
    _rejected(
        "a cap that is an input",
        case_graph(
            "c = MatMul (q, kt)  f = Div (c, n)  t = Tanh (f)  u = Mul (t, n)  w = Softmax <axis = -1> (u)"
            "  y = MatMul (w, v)",
            ", float n",
        ),
        rejection="the cap is not",
    ),
    _rejected(
        "scores capped behind the mask",
        case_graph(
            "c = MatMul (q, kt)  e = Add (c, m)  t = Tanh (e)  u = Mul (t, r)  w = Softmax <axis = -1> (u)"
            "  y = MatMul (w, v)",
            ", float[B,1,S,L] m",
        ),
    ),
    _rejected("softmax over queries", case_graph(_PLAIN.replace("-1", "2")), rejection="last axis"),
    _rejected("weights are an output", case_graph(_PLAIN, outputs=", float[B,2,S,L] w")),
    _rejected("scores are read twice", case_graph(_PLAIN, outputs=", float[B,2,S,L] c")),
    _rejected(
        "scale per head",
        case_graph(_PLAIN, ", float[2,1,1] h").replace("Mul (c, a)", "Mul (c, h)"),
        rejection="constant scalar",
    ),
]
