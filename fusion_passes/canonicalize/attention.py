"""Attention: every spelling becomes sd_ort.ScaledDotProductAttention(q, k, v, mask?; scale), on [B,H,S,D].

    MatMul(q * a, kT * b) / c                     =>  MatMul(q, kT) * (a*b/c)            scales move behind it
    MatMul(Softmax(MatMul(q, kT) * s + m), v)     =>  SDPA(q, Transpose(kT), v, m; scale=s)
    Where(IsNaN(p), 0, p) after the Softmax       is dropped where the mask is finite: then no row of p is NaN
    ai.onnx Attention on 4-D tensors (opset 23)   =>  SDPA, a causal flag kept
    3-D attention over [B*H,S,D] (Optimum, old diffusers)  =>  SDPA over [B,H,S,D]
    SDPA of heads split from q * s                =>  SDPA of heads split from q, scale * s
    a Softmax between Casts from half precision to float32 and back  =>  the Softmax

A mask is carried over as it is, a scale as a number; a Softmax on another axis, a mask that may be infinite behind a
NaN guard, or probabilities that something else reads are left alone.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from onnxscript.rewriter.pattern import OrValue, Var

from fusion_passes import checks as c
from fusion_passes.operators.record import DOMAIN
from fusion_passes.pass_ import Case
from fusion_passes.rewriting import unique
from fusion_passes.rule import Rule


def reference(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray | None = None, scale: float | None = None
) -> np.ndarray:
    """softmax(q k^T * scale + mask) v (Vaswani et al., 2017); q [B,H,S,D], k [B,H,L,D], v [B,H,L,E]."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scores = q @ np.swapaxes(k, -1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if mask is None else scores + mask
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True) @ v)


def feeds_softmax(value: ir.Value, depth: int = 4) -> bool:
    """Whether a value is read only by a Softmax, or on the way to one through scaling, masking and reshaping."""
    readers = c.users(value)
    if depth == 0 or len(readers) != 1 or value.is_graph_output():
        return False
    if readers[0].op_type == "Softmax":
        return True
    return readers[0].op_type in ("Mul", "Div", "Add", "Reshape", "Cast") and feeds_softmax(
        readers[0].outputs[0], depth - 1
    )


def _number(op: Any, number: float, like: ir.Value, out: ir.Value) -> Any:
    dtype = like.dtype or ir.DataType.FLOAT
    return op.initializer(ir.tensor(np.array(number, dtype.numpy())), name=unique(out, "scale"))


class ScaledQuery(Rule):
    """MatMul(q * s, kT) => MatMul(q, kT) * s"""

    def pattern(self, op: Any, x: Any, y: Any, s: Any) -> Any:
        return op.MatMul(op.Mul(x, s), y, _outputs=["out"])

    def refuse(self, s: ir.Value, out: ir.Value, **_: Any) -> str | None:
        if not feeds_softmax(out):
            return "not the scores of an attention"
        return None if c.scalar(s) is not None else "the scale is not one constant number"

    def rewrite(self, op: Any, x: ir.Value, y: ir.Value, s: ir.Value, out: ir.Value) -> Any:
        return op.Mul(op.MatMul(x, y), _number(op, c.scalar(s) or 0.0, out, out))


class ScaledKey(ScaledQuery):
    """MatMul(q, kT * s) => MatMul(q, kT) * s"""

    def pattern(self, op: Any, x: Any, y: Any, s: Any) -> Any:
        return op.MatMul(x, op.Mul(y, s), _outputs=["out"])


class MergeScales(Rule):
    """(x * a) * b => x * (a*b); a Div counts as a product with the inverse."""

    def pattern(self, op: Any, x: Any, a: Any, b: Any) -> Any:
        return op.Mul(op.Mul(x, a), b, _outputs=["out"])

    def refuse(self, a: ir.Value, b: ir.Value, out: ir.Value, **_: Any) -> str | None:
        if not feeds_softmax(out):
            return "not the scores of an attention"
        return None if c.scalar(a) is not None and c.scalar(b) is not None else "a scale is not one constant number"

    def rewrite(self, op: Any, x: ir.Value, a: ir.Value, b: ir.Value, out: ir.Value) -> Any:
        return op.Mul(x, _number(op, (c.scalar(a) or 0.0) * (c.scalar(b) or 0.0), x, out))


class DivisionIsScale(Rule):
    """scores / s => scores * (1/s)"""

    def pattern(self, op: Any, x: Any, s: Any) -> Any:
        return op.Div(x, s, _outputs=["out"])

    def refuse(self, s: ir.Value, out: ir.Value, **_: Any) -> str | None:
        if not c.scalar(s):
            return "the divisor is not one constant number"
        return None if feeds_softmax(out) else "not the scores of an attention"

    def rewrite(self, op: Any, x: ir.Value, s: ir.Value, out: ir.Value) -> Any:
        return op.Mul(x, _number(op, 1 / (c.scalar(s) or math.nan), x, out))


class SoftmaxInFloat32(Rule):
    """Cast(Softmax(Cast(x, float32))) => Softmax(x) for x in half precision: kernels sum in float32 all the same."""

    def pattern(self, op: Any, x: Any) -> Any:
        return op.Cast(op.Softmax(op.Cast(x, _outputs=["wide"]), _outputs=["weights"]), _outputs=["out"])

    def refuse(self, x: ir.Value, wide: ir.Value, out: ir.Value, **_: Any) -> str | None:
        halves = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
        if x.dtype not in halves or wide.dtype != ir.DataType.FLOAT or out.dtype != x.dtype:
            return "the Casts do not widen half precision and narrow it again"
        return None

    def rewrite(self, op: Any, x: ir.Value, weights: ir.Value, **_: Any) -> Any:
        node = weights.producer()
        assert node is not None
        return op.Softmax(x, axis=node.attributes.get_int("axis", -1))


def is_finite_mask(mask: ir.Value | None, limit: float | None = None) -> bool:
    """Whether a mask surely holds no infinity: a constant, or a choice between two finite numbers.

    `limit`: the largest finite number of the type it is read in, that of the mask itself when not given.
    """
    node = None if mask is None else mask.producer()
    if limit is None:
        if mask is None or mask.dtype is None or not mask.dtype.is_floating_point():
            return False
        limit = float(ml_dtypes.finfo(mask.dtype.numpy()).max)
    if node is not None and node.op_type == "Where":
        choices = [c.scalar(v) for v in node.inputs[1:]]
        return all(x is not None and abs(x) <= limit for x in choices)
    if node is not None and node.op_type in ("Cast", "Expand", "Reshape", "Slice"):
        return is_finite_mask(node.inputs[0], limit)
    numbers = c.constant(mask)
    return numbers is not None and bool((np.abs(numbers.astype(np.float64)) <= limit).all())


def why_not_batch(*shapes: list[int | str]) -> str | None:
    """Why 4-D query, key and value cannot belong to one attention, or None: batch and heads are the same."""
    if any(shape[:2] != shapes[0][:2] for shape in shapes):
        return f"query, key and value differ in batch or heads: {', '.join(str(shape[:2]) for shape in shapes)}"
    return None


def why_not_mask(mask: ir.Value, q: ir.Value, k_sequence: int | str, v: ir.Value) -> str | None:
    """Why a mask cannot be carried over, or None: each of its axes is 1 or that of the scores [B,H,S,L]."""
    shape, query = c.dims(mask), c.dims(q)
    if shape is None or query is None or not 1 <= len(shape) <= 4:
        return "the mask does not broadcast to [B,H,S,L]"
    scores = [*query[:3], k_sequence]
    if any(axis not in (1, full) for axis, full in zip(shape[::-1], scores[::-1], strict=False)):
        return f"the mask's axes {shape} are not those of the scores {scores}"
    return None if mask.dtype == v.dtype else "the mask is of another type than the scores"


class Sdpa(Rule):
    """MatMul(Softmax(MatMul(q, kT) * s + m), v), each of s, m and the NaN guard optional."""

    def pattern(self, op: Any, q: Any, k_t: Any, v: Any, s: Any, mask: Any, zero: Any) -> Any:
        scores = op.MatMul(q, k_t)
        scaled = OrValue([op.Mul(scores, s), scores])
        masked = OrValue([op.Add(scaled, mask), op.Add(mask, scaled), scaled])
        weights = op.Softmax(masked, _outputs=["weights"])
        guarded = OrValue([op.Where(op.IsNaN(weights, _outputs=["nan"]), zero, weights), weights])
        return op.MatMul(guarded, v, _outputs=["out"])

    def refuse(
        self, q: ir.Value, k_t: ir.Value, v: ir.Value, s: ir.Value | None, mask: ir.Value | None,
        zero: ir.Value | None, weights: ir.Value, out: ir.Value | None = None, **_: Any,
    ) -> str | None:  # fmt: skip
        node = weights.producer()
        assert node is not None
        if not c.last_axis(node.attributes.get_int("axis", -1), weights):
            return "the Softmax is not over the last axis"
        shapes = [c.dims(x) or [] for x in (q, k_t, v)]
        if any(len(d) != 4 for d in shapes):
            return "query, key and value are not all 4-D"
        if not isinstance(shapes[0][-1], int):
            return "the head size is unknown"
        if s is not None and c.scalar(s) is None:
            return "the scale is not one constant number"
        if reason := why_not_batch(*shapes):
            return reason
        if mask is not None and (reason := why_not_mask(mask, q, shapes[1][3], v)):
            return reason
        if zero is not None and c.scalar(zero) != 0:
            return "NaN rows are replaced by something else than 0"
        if zero is not None and mask is not None and not is_finite_mask(mask):
            return "rows of the mask may be all -infinity, which the NaN guard turns into zeros"
        return None

    def rewrite(
        self, op: Any, q: ir.Value, k_t: ir.Value, v: ir.Value, s: ir.Value | None, mask: ir.Value | None, **_: Any
    ) -> Any:  # fmt: skip
        inputs = [q, op.Transpose(k_t, perm=[0, 1, 3, 2]), v] + ([] if mask is None else [mask])
        scale = 1.0 if s is None else c.scalar(s)
        return op.ScaledDotProductAttention(*inputs, scale=scale, is_causal=0, _domain=DOMAIN)


class Sdpa3D(Sdpa):
    """The same on [B*H,S,D], between Reshapes from and to [B,H,S,D] (diffusers before SDPA, Optimum's old exports)."""

    def __init__(self) -> None:
        # A Shape may read the flat query to give the flat key its shape; what is not read any more is removed later.
        super().__init__(remove_nodes=False)

    def pattern(
        self,
        op: Any,
        q: Any,
        k_t: Any,
        v: Any,
        s: Any,
        q3: Any,
        k3: Any,
        v3: Any,
        back: Any,
        mask: Any,
        m3: Any,
        m4: Any,
    ) -> Any:
        query = op.Reshape(q, q3, _outputs=["q_flat"])
        keys = op.Transpose(op.Reshape(k_t, k3, _outputs=["k_flat"]), perm=[0, 2, 1])
        scores = op.MatMul(query, keys, _outputs=["scores"])
        weights = op.Softmax(self.masked(op, OrValue([op.Mul(scores, s), scores]), mask, m3, m4), _outputs=["weights"])
        out = op.MatMul(weights, op.Reshape(v, v3, _outputs=["v_flat"]), _outputs=["flat"])
        return op.Reshape(out, back, _outputs=["out"])

    def masked(self, op: Any, scores: Any, mask: Any, m3: Any, m4: Any) -> Any:
        return scores

    def refuse(
        self, q: ir.Value, k_t: ir.Value, v: ir.Value, s: ir.Value | None, weights: ir.Value, out: ir.Value,
        mask: ir.Value | None = None, **rest: Any,
    ) -> str | None:  # fmt: skip
        reason = super().refuse(q=q, k_t=k_t, v=v, s=s, mask=None, zero=None, weights=weights)
        if reason:
            return reason
        length = (c.dims(k_t) or [])[2]
        if mask is not None and (reason := why_not_mask(mask, q, length, v)):
            return reason
        if mask is not None and c.dims(rest["scores4"]) != [*(c.dims(q) or [])[:3], length]:
            return "the mask is not added on [B,H,S,L]"
        inside = [rest[name] for name in ("scores", "scores4", "scores3", "flat") if name in rest] + [weights]
        if any(len(c.readers(x)) > 1 or x.is_graph_output() for x in inside):
            return "something else reads the scores, the weights or the result"
        for x, flat in ((q, rest["q_flat"]), (k_t, rest["k_flat"]), (v, rest["v_flat"])):
            if len(c.dims(flat) or []) != 3 or (c.dims(flat) or [])[1:] != (c.dims(x) or [])[2:]:
                return "the Reshapes do not merge the batch and head axes"
        expected = [*(c.dims(q) or [])[:3], (c.dims(v) or [])[-1]]
        return None if c.dims(out) == expected else "the batch and head axes are not restored"

    def rewrite(
        self,
        op: Any,
        q: ir.Value,
        k_t: ir.Value,
        v: ir.Value,
        s: ir.Value | None,
        mask: ir.Value | None = None,
        **_: Any,
    ) -> Any:
        inputs = [q, k_t, v] + ([] if mask is None else [mask])
        scale = 1.0 if s is None else c.scalar(s)
        return op.ScaledDotProductAttention(*inputs, scale=scale, is_causal=0, _domain=DOMAIN)


class MaskedSdpa3D(Sdpa3D):
    """The same with a mask that is added between Reshapes to [B,H,S,L] and back (CLIP before SDPA)."""

    def masked(self, op: Any, scores: Any, mask: Any, m3: Any, m4: Any) -> Any:
        total = op.Add(op.Reshape(scores, m4, _outputs=["scores4"]), mask)
        return op.Reshape(total, m3, _outputs=["scores3"])

    def refuse(self, **bindings: Any) -> str | None:
        three, four = c.dims(bindings["scores3"]), c.dims(bindings["scores4"])
        if three is None or four is None or len(three) != 3 or len(four) != 4 or three[1:] != four[2:]:
            return "the Reshapes around the mask do not split and merge the batch and head axes"
        return super().refuse(**bindings)


class FromAttention(Rule):
    """ai.onnx Attention (opset 23) on [B,H,S,D] tensors with one output.

    A boolean mask becomes 0 where it keeps and the lowest finite number where it drops, as torch.onnx writes it below
    opset 23; the two differ only in rows that drop everything, whose result is undefined.
    """

    def pattern(self, op: Any, q: Any, k: Any, v: Any) -> Any:
        return op.Attention(q, k, v, Var("mask", can_match_none=True), _outputs=["out"])

    def refuse(self, q: ir.Value, k: ir.Value, v: ir.Value, out: ir.Value, mask: ir.Value | None) -> str | None:
        node = out.producer()
        assert node is not None
        if any(x is not None for x in node.inputs[4:]) or len(node.outputs) > 1:
            return "it keeps a cache of keys and values"
        shapes = [c.dims(x) or [] for x in (q, k, v)]
        if any(len(shape) != 4 for shape in shapes) or not isinstance(shapes[0][-1], int):
            return "query, key and value are not all 4-D with a known head size"
        if reason := why_not_batch(*shapes):
            return reason
        if mask is not None and (reason := why_not_mask(mask, q, shapes[1][2], mask)):
            return reason
        if mask is not None and mask.dtype not in (ir.DataType.BOOL, q.dtype):
            return "the mask is of another type than the scores"
        if node.attributes.get_float("softcap", 0.0) or node.attributes.get_int("qk_matmul_output_mode", 0):
            return "it caps or returns the scores"
        return None

    def rewrite(self, op: Any, q: ir.Value, k: ir.Value, v: ir.Value, out: ir.Value, mask: ir.Value | None) -> Any:
        node = out.producer()
        assert node is not None
        default = (c.size(q, -1) or 1) ** -0.5
        scale = node.attributes.get_float("scale", default)
        if mask is not None and mask.dtype == ir.DataType.BOOL:
            dtype = (q.dtype or ir.DataType.FLOAT).numpy()
            keep, drop = (op.initializer(ir.tensor(np.array(x, dtype)), name=unique(out, name))
                          for x, name in ((0, "keep"), (np.finfo(dtype).min, "drop")))  # fmt: skip
            mask = op.Where(mask, keep, drop)
        inputs = [q, k, v] + ([] if mask is None else [mask])
        causal = node.attributes.get_int("is_causal", 0)
        return op.ScaledDotProductAttention(*inputs, scale=scale, is_causal=causal, _domain=DOMAIN)


class ScaledProjection(Rule):
    """SDPA(Transpose(Reshape(q * s)), k, v; scale) => SDPA(Transpose(Reshape(q)), k, v; scale * s)"""

    def pattern(self, op: Any, q: Any, s: Any, shape: Any, k: Any, v: Any) -> Any:
        heads = op.Transpose(op.Reshape(op.Mul(q, s, _outputs=["scaled"]), shape), _outputs=["query"])
        mask = Var("mask", can_match_none=True)
        return op.ScaledDotProductAttention(heads, k, v, mask, _domain=DOMAIN, _outputs=["out"])

    def refuse(self, q: ir.Value, s: ir.Value, scaled: ir.Value, **_: Any) -> str | None:
        if c.scalar(s) is None or not c.same_shape(q, scaled):
            return "the scale is not one constant number"
        return None

    def rewrite(
        self, op: Any, q: ir.Value, s: ir.Value, shape: ir.Value, k: ir.Value, v: ir.Value, query: ir.Value,
        out: ir.Value, mask: ir.Value | None, **_: Any,
    ) -> Any:  # fmt: skip
        node = out.producer()
        assert node is not None
        heads = op.Transpose(op.Reshape(q, shape), perm=c.perm(query))
        attributes = {name: a.value for name, a in node.attributes.items()}
        attributes["scale"] = attributes["scale"] * (c.scalar(s) or 0.0)
        inputs = [heads, k, v] + ([] if mask is None else [mask])
        return op.ScaledDotProductAttention(*inputs, _domain=DOMAIN, **attributes)


SCALES = (SoftmaxInFloat32, DivisionIsScale, ScaledQuery, ScaledKey, MergeScales)
RULES = (Sdpa, Sdpa3D, MaskedSdpa3D, FromAttention)
AFTER = (ScaledProjection,)


def _graph(body: str, extra: str = "", outputs: str = "", opset: int = 21) -> str:
    return f"""<ir_version: 10, opset_import: ["" : {opset}]>
        g (float[B,2,S,4] q, float[B,2,L,4] k, float[B,2,L,4] v {extra}) => (float[B,2,S,4] y {outputs})
        <float a = {{0.7}}, float b = {{0.6}}, float z = {{0.0}}, float low = {{-3.0e38}}, float r = {{2.0}}> {{
            kt = Transpose <perm = [0, 1, 3, 2]> (k)
            {body}
        }}"""


def _flat(body: str, extra: str = "", outputs: str = "") -> str:
    """Attention on [B*H,S,D]; the flat query gives its shape to the flat key, as diffusers' baddbmm is written."""
    return f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[B,2,S,4] q, float[B,2,S,4] k, float[B,2,S,4] v {extra}) => (float[B,2,S,4] y {outputs})
        <int64[1] flat = {{-1}}, int64[1] d = {{4}}, float a = {{0.7}}, float zero = {{0.0}}> {{
            s = Shape <start = 2, end = 3> (q)
            three = Concat <axis = 0> (flat, s, d)
            q3 = Reshape (q, three)  like = Shape (q3)
            k3 = Reshape (k, like)   v3 = Reshape (v, like)
            kt = Transpose <perm = [0, 2, 1]> (k3)
            c = MatMul (q3, kt)      m = Mul (c, a)
            {body}
            u = MatMul (w, v3)
            whole = Shape (q)
            y = Reshape (u, whole)
        }}"""


_ADD_ZEROS = """edges = Shape (c)  zeros = ConstantOfShape <value = float[1] {0.0}> (edges)
            none = Mul (zeros, zero)  e = Add (none, m)  w = Softmax <axis = -1> (e)"""
_ADD_ONES = _ADD_ZEROS.replace("{0.0}", "{1.0}").replace("zero)", "a)")
_ADD_MASK = """batch = Shape <start = 0, end = 1> (q)  two = Constant <value = int64[1] {2}> ()
            four = Concat <axis = 0> (batch, two, s, s)  m4 = Reshape (m, four)  e = Add (m4, real)
            m3 = Shape (m)  back3 = Reshape (e, m3)  w = Softmax <axis = -1> (back3)"""
_FLAT_SIZES = {"B": 2, "S": 5, "P": 4}
_PLAIN = "c = MatMul (q, kt)  d = Mul (c, a)  w = Softmax <axis = -1> (d)  y = MatMul (w, v)"
_GUARD = "n = IsNaN (w)  u = Where (n, z, w)  y = MatMul (u, v)"
_SIZES = {"B": 2, "S": 5, "L": 3}
_ONE = {"ScaledDotProductAttention": 1, "Softmax": 0, "MatMul": 0}
CASES = [
    Case("scale after the product", _graph(_PLAIN), ops=_ONE, sizes=_SIZES),
    Case(
        "no scale", _graph("c = MatMul (q, kt)  w = Softmax <axis = 3> (c)  y = MatMul (w, v)"), ops=_ONE, sizes=_SIZES
    ),
    Case(
        "scales on query and key",
        _graph(
            "qs = Mul (q, a)  ks = Mul (kt, b)  c = MatMul (qs, ks)  w = Softmax <axis = -1> (c)  y = MatMul (w, v)"
        ),
        ops=_ONE | {"Mul": 0},
        sizes=_SIZES,
    ),
    Case(
        "divided scores and a mask",
        _graph(
            "c = MatMul (q, kt)  d = Div (c, r)  e = Add (d, m)  w = Softmax <axis = -1> (e)  y = MatMul (w, v)",
            ", float[B,1,S,L] m",
        ),
        ops=_ONE | {"Add": 0},
        sizes=_SIZES,
    ),
    Case(
        "finite mask behind a NaN guard",
        _graph(
            "m = Where (keep, z, low)  c = MatMul (q, kt)  d = Mul (c, a)  e = Add (d, m)  w = Softmax <axis = -1> (e) "
            + _GUARD,
            ", bool[B,1,S,L] keep",
        ),
        ops=_ONE | {"IsNaN": 0},
        sizes=_SIZES,
    ),
    Case(
        "mask that may be infinite behind a NaN guard",
        _graph(
            "c = MatMul (q, kt)  d = Mul (c, a)  e = Add (d, m)  w = Softmax <axis = -1> (e) " + _GUARD,
            ", float[B,1,S,L] m",
        ),
        fires=0,
        refused="-infinity",
        sizes=_SIZES,
    ),
    Case(
        "mask a key, broadcast",
        _graph(
            "c = MatMul (q, kt)  d = Mul (c, a)  e = Add (m, d)  w = Softmax <axis = -1> (e)  y = MatMul (w, v)",
            ", float[B,1,1,L] m",
        ),
        ops=_ONE | {"Add": 0},
        sizes=_SIZES,
    ),
    Case(
        "mask that enlarges the batch",
        """<ir_version: 10, opset_import: ["" : 21]>
        g (float[1,2,S,4] q, float[1,2,L,4] k, float[1,2,L,4] v, float[B,1,S,L] m) => (float[B,2,S,4] y) {
            kt = Transpose <perm = [0, 1, 3, 2]> (k)
            c = MatMul (q, kt)  e = Add (c, m)  w = Softmax <axis = -1> (e)  y = MatMul (w, v)
        }""",
        fires=0,
        refused="the mask's axes",
        sizes=_SIZES,
    ),
    Case(
        "mask of another size",
        _graph("c = MatMul (q, kt)  e = Add (c, m)  w = Softmax <axis = -1> (e)  y = MatMul (w, v)", ", float[M,3] m"),
        fires=0,
        refused="the mask's axes",
        sizes=_SIZES | {"M": 5},
    ),
    Case(
        "keys of one batch for all queries",
        """<ir_version: 10, opset_import: ["" : 21]>
        g (float[B,2,S,4] q, float[1,2,L,4] k, float[1,2,L,4] v) => (float[B,2,S,4] y) {
            kt = Transpose <perm = [0, 1, 3, 2]> (k)
            c = MatMul (q, kt)  w = Softmax <axis = -1> (c)  y = MatMul (w, v)
        }""",
        fires=0,
        refused="differ in batch",
        sizes=_SIZES,
    ),
    Case(
        "one key head for all query heads",
        """<ir_version: 10, opset_import: ["" : 21]>
        g (float[B,4,S,4] q, float[B,1,L,4] k, float[B,1,L,4] v) => (float[B,4,S,4] y) {
            kt = Transpose <perm = [0, 1, 3, 2]> (k)
            c = MatMul (q, kt)  w = Softmax <axis = -1> (c)  y = MatMul (w, v)
        }""",
        fires=0,
        refused="differ in batch or heads",
        sizes=_SIZES,
    ),
    Case(
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
        fires=0,
        refused="-infinity",
        sizes=_SIZES,
    ),
    Case(
        "NaN rows replaced by ones",
        _graph(_PLAIN.split("  y =")[0] + "  n = IsNaN (w)  u = Where (n, r, w)  y = MatMul (u, v)"),
        fires=0,
        refused="something else than 0",
        sizes=_SIZES,
    ),
    Case(
        "softmax over the keys of a transposed product",
        _graph(
            "c = MatMul (q, kt)  t = Transpose <perm = [0, 1, 3, 2]> (c)  w = Softmax <axis = -1> (t) "
            " b2 = Transpose <perm = [0, 1, 3, 2]> (w)  y = MatMul (b2, v)"
        ),
        fires=0,
        sizes=_SIZES,
    ),
    Case(
        "operator with a float mask",
        _graph("y = Attention (q, k, v, m)", ", float[S,L] m", opset=23),
        ops=_ONE,
        sizes={"B": 2, "S": 5, "L": 7},
    ),
    Case(
        "operator with fewer key heads",
        """<ir_version: 10, opset_import: ["" : 23]>
        g (float[B,4,S,4] q, float[B,2,L,4] k, float[B,2,L,4] v) => (float[B,4,S,4] y) { y = Attention (q, k, v) }""",
        fires=0,
        refused="differ in batch or heads",
        sizes=_SIZES,
    ),
    Case(
        "operator that caps its scores",
        _graph("y = Attention <softcap = 2.0> (q, k, v)", opset=23),
        fires=0,
        refused="caps",
        sizes=_SIZES,
    ),
    Case(
        "operator whose keys grow from a cache",
        """<ir_version: 10, opset_import: ["" : 23]>
        g (float[B,2,S,4] q, float[B,2,S,4] k, float[B,2,S,4] v, float[B,2,P,4] pk, float[B,2,P,4] pv)
            => (float[B,2,S,4] y, float[B,2,T,4] nk, float[B,2,T,4] nv) {
            y, nk, nv = Attention (q, k, v, , pk, pv) }""",
        fires=0,
        sizes={"B": 2, "S": 3, "P": 2},
    ),
    Case("operator of opset 23", _graph("y = Attention (q, k, v)", opset=23), ops=_ONE, sizes=_SIZES),
    Case(
        "causal operator",
        _graph("y = Attention <is_causal = 1, scale = 0.3> (q, k, v)", opset=23),
        ops=_ONE,
        sizes={"B": 2, "S": 4, "L": 4},
    ),
    Case(
        "operator with a boolean mask",
        _graph("y = Attention (q, k, v, keep)", ", bool[B,1,S,L] keep", opset=23),
        ops=_ONE | {"Where": 1},
        sizes={"B": 2, "S": 5, "L": 7},
    ),
    Case("batch and heads merged", _flat("w = Softmax <axis = -1> (m)"), ops=_ONE, sizes=_FLAT_SIZES),
    Case("batch and heads merged, zeros added", _flat(_ADD_ZEROS), ops=_ONE | {"Add": 0}, sizes=_FLAT_SIZES),
    Case(
        "batch and heads merged, a mask added in between",
        _flat(_ADD_MASK, ", float[B,1,S,S] real"),
        ops=_ONE | {"Add": 0},
        sizes=_FLAT_SIZES,
    ),
    Case(
        "batch and heads merged, a mask a flat head",
        _flat("e = Add (m, real)  w = Softmax <axis = -1> (e)", ", float[P,S,S] real"),
        fires=0,
        sizes=_FLAT_SIZES,
    ),
    Case(
        "batch and heads merged, the mask added with heads first",
        _flat(_ADD_MASK.replace("(batch, two, s, s)", "(two, batch, s, s)"), ", float[2,1,S,S] real"),
        fires=0,
        refused="not those of the scores",
        sizes=_FLAT_SIZES,
    ),
    Case("batch and heads merged, ones added", _flat(_ADD_ONES), fires=0, sizes=_FLAT_SIZES),
    Case(
        "batch and heads merged, weights are an output",
        _flat("w = Softmax <axis = -1> (m)", outputs=", float[P,S,S] w"),
        fires=0,
        refused="something else reads",
        sizes=_FLAT_SIZES,
    ),
    Case("softmax over queries", _graph(_PLAIN.replace("-1", "2")), fires=0, refused="last axis", sizes=_SIZES),
    Case("weights are an output", _graph(_PLAIN, outputs=", float[B,2,S,L] w"), fires=0, sizes=_SIZES),
    Case("scores are read twice", _graph(_PLAIN, outputs=", float[B,2,S,L] c"), fires=0, sizes=_SIZES),
    Case(
        "scale a head",
        _graph(_PLAIN, ", float[2,1,1] h").replace("Mul (c, a)", "Mul (c, h)"),
        fires=0,
        refused="one constant",
        sizes=_SIZES,
    ),
]
