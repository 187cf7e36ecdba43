"""Attention on three axes without a split into [B,H,S,D]: channels first, or with a single head.

    q, k, v: [B,N*D,S] -> Reshape [B*N,D,S], products over D, weights @ vT, back to [B,N*D,S]
        =>  Transpose 021, heads split as tokens are ([B,S,N,D] -> Transpose 0213), SDPA, and the way back
    MatMul(Softmax(MatMul(q, kT) * s + m), v) on [B,S,D], [B,D,L], [B,L,E]
        =>  the same with one head: SDPA on [B,1,S,D]

The first is the convolutional attention of ADM (Guided Diffusion), the second that of autoencoders. Rejected: batches
that may differ, a Softmax on another axis, other consumers of the attention weights.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.pattern import OrValue

from fusion_passes import DOMAIN
from fusion_passes import value_queries as values
from fusion_passes.canonicalize.attention.masks import mask_mismatch
from fusion_passes.graph_edits import unique_name
from fusion_passes.graph_pass import case_makers
from fusion_passes.rule import Rule, rule_pass


def _ints(op: Any, out: ir.Value, name: str, *elements: int) -> Any:
    return op.initializer(ir.tensor(list(elements), dtype=ir.DataType.INT64), name=unique_name(out, name))


def _split(op: Any, x: Any, heads: int, size: int, out: ir.Value, name: str) -> Any:
    """Return [B,S,N*D] as [B,N,S,D]."""
    return op.Transpose(op.Reshape(x, _ints(op, out, name, 0, 0, heads, size)), perm=[0, 2, 1, 3])


def _softmax_reject_reason(weights: ir.Value, s: ir.Value | None) -> str | None:
    if not values.last_axis(values.producer(weights).attributes.get_int("axis", -1), weights):
        return "the Softmax is not over the last axis"
    return "the scale is not a constant scalar" if s is not None and values.scalar(s) is None else None


class ChannelsFirst(Rule):
    """Attention with heads split from the channels of [B,C,S] tensors => SDPA"""

    def pattern(self, op: Any, q: Any, k: Any, v: Any, s: Any, q3: Any, k3: Any, v3: Any, back: Any) -> Any:
        query = op.Transpose(op.Reshape(q, q3, _outputs=["q_heads"]), perm=[0, 2, 1])
        scores = op.MatMul(query, op.Reshape(k, k3, _outputs=["k_heads"]))
        weights = op.Softmax(OrValue([op.Mul(scores, s), scores]), _outputs=["weights"])
        v_t = op.Transpose(op.Reshape(v, v3, _outputs=["v_heads"]), perm=[0, 2, 1])
        return op.Reshape(op.Transpose(op.MatMul(weights, v_t), perm=[0, 2, 1]), back, _outputs=["out"])

    def reject_reason(
        self, q: ir.Value, k: ir.Value, v: ir.Value, s: ir.Value | None, q_heads: ir.Value, k_heads: ir.Value,
        v_heads: ir.Value, weights: ir.Value, out: ir.Value, **_: Any,
    ) -> str | None:  # fmt: skip
        if reason := _softmax_reject_reason(weights, s):
            return reason
        counts = set()
        for x, heads in ((q, q_heads), (k, k_heads), (v, v_heads)):
            before, after = values.dims(x) or [], values.dims(heads) or []
            if len(before) != 3 or len(after) != 3 or before[2] != after[2]:
                return "a Reshape does not split the channels of [B,C,S]"
            if not (isinstance(before[1], int) and isinstance(after[1], int)) or before[1] % after[1]:
                return "the channels or the head size are unknown"
            counts.add(before[1] // after[1])
        if len(counts) != 1 or any((values.dims(x) or [])[0] != (values.dims(q) or [])[0] for x in (k, v)):
            return "query, key and value differ in batch or heads"
        if values.dims(out) != [*(values.dims(v) or [])[:2], (values.dims(q) or [])[2]]:
            return "the heads are not merged into channels"
        return None

    def rewrite(
        self, op: Any, q: ir.Value, k: ir.Value, v: ir.Value, s: ir.Value | None, q_heads: ir.Value,
        v_heads: ir.Value, out: ir.Value, **_: Any,
    ) -> Any:  # fmt: skip
        size, value_size = values.size(q_heads, 1) or 1, values.size(v_heads, 1) or 1
        heads = (values.size(q, 1) or 1) // size
        tokens = [op.Transpose(x, perm=[0, 2, 1]) for x in (q, k, v)]
        split = [
            _split(op, x, heads, width, out, name)
            for x, width, name in zip(tokens, (size, size, value_size), ("q_split", "k_split", "v_split"), strict=True)
        ]
        scale = 1.0 if s is None else values.scalar(s)
        result = op.ScaledDotProductAttention(*split, scale=scale, is_causal=0, _domain=DOMAIN)
        merged = op.Reshape(op.Transpose(result, perm=[0, 2, 1, 3]), _ints(op, out, "merge", 0, 0, heads * value_size))
        return op.Transpose(merged, perm=[0, 2, 1])


class OneHead(Rule):
    """Attention with one head on [B,S,D] tensors => SDPA"""

    def pattern(self, op: Any, q: Any, k_t: Any, v: Any, s: Any, mask: Any) -> Any:
        scores = op.MatMul(q, k_t)
        scaled = OrValue([op.Mul(scores, s), scores])
        weights = op.Softmax(OrValue([op.Add(scaled, mask), op.Add(mask, scaled), scaled]), _outputs=["weights"])
        return op.MatMul(weights, v, _outputs=["out"])

    def reject_reason(
        self, q: ir.Value, k_t: ir.Value, v: ir.Value, s: ir.Value | None, mask: ir.Value | None, weights: ir.Value,
        **_: Any,
    ) -> str | None:  # fmt: skip
        shapes = [values.dims(x) or [] for x in (q, k_t, v)]
        if any(len(shape) != 3 for shape in shapes):
            return "query, key and value are not all 3-D"
        if reason := _softmax_reject_reason(weights, s):
            return reason
        if not isinstance(shapes[0][2], int) or not isinstance(shapes[2][2], int):
            return "the head size is unknown"
        if any(shape[0] != shapes[0][0] for shape in shapes):
            return f"query, key and value differ in batch: {', '.join(str(shape[0]) for shape in shapes)}"
        if mask is None:
            return None
        if len(values.dims(mask) or []) > 2:
            return "the mask differs between batch entries"
        return mask_mismatch(mask, q, shapes[1][2], v, [1, 1, shapes[0][1]])

    def rewrite(
        self, op: Any, q: ir.Value, k_t: ir.Value, v: ir.Value, s: ir.Value | None, mask: ir.Value | None,
        out: ir.Value, **_: Any,
    ) -> Any:  # fmt: skip
        size, width = values.size(q, 2) or 1, values.size(v, 2) or 1
        k = op.Transpose(k_t, perm=[0, 2, 1])
        query, key = (_split(op, x, 1, size, out, name) for x, name in ((q, "q_split"), (k, "k_split")))
        inputs = [query, key, _split(op, v, 1, width, out, "v_split")] + ([] if mask is None else [mask])
        scale = 1.0 if s is None else values.scalar(s)
        result = op.ScaledDotProductAttention(*inputs, scale=scale, is_causal=0, _domain=DOMAIN)
        return op.Reshape(op.Transpose(result, perm=[0, 2, 1, 3]), _ints(op, out, "merge", 0, 0, width))


RULES = (ChannelsFirst,)
ONE_HEAD_RULES = (OneHead,)  # run last, because parts of the other patterns match it too

_TO_HEADS = "int64[3] heads = {-1, 4, 5}, int64[3] text = {-1, 4, 3}"


def _channels(
    body: str = "", outputs: str = "", constants: str = _TO_HEADS, last: str = "y = Reshape (u, whole)"
) -> str:
    return f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[B,8,5] q, float[B,8,3] k, float[B,8,3] v) => (float[B,8,5] y {outputs})
        <{constants}, float a = {{0.7}}, int64[3] whole = {{-1, 8, 5}}> {{
            qs = Mul (q, a)           ks = Mul (k, a)
            q3 = Reshape (qs, heads)  k3 = Reshape (ks, text)  v3 = Reshape (v, text)
            c = Einsum <equation = "bct,bcs->bts"> (q3, k3)
            {body or "w = Softmax <axis = -1> (c)"}
            u = Einsum <equation = "bts,bcs->bct"> (w, v3)
            {last}
        }}"""


def _tokens(body: str, extra: str = "", outputs: str = "") -> str:
    return f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[B,S,4] q, float[B,4,L] k, float[B,L,6] v {extra}) => (float[B,S,6] y {outputs})
        <float a = {{0.7}}> {{
            c = MatMul (q, k)  m = Mul (c, a)
            {body}
            y = MatMul (w, v)
        }}"""


_ONE = {"ScaledDotProductAttention": 1, "Softmax": 0, "MatMul": 0}
_SIZES, _TOKENS = {"B": 2, "P": 4}, {"B": 2, "S": 5, "L": 3}
_PLAIN = "w = Softmax <axis = -1> (m)"
_case, _rejected = case_makers(_TOKENS)
CASES = [
    _case("convolutional attention", _channels(), ops=_ONE | {"Einsum": 0, "Mul": 0}, sizes=_SIZES),
    _rejected(
        "a Softmax over the queries",
        _channels("w = Softmax <axis = 1> (c)"),
        rejection="not over the last axis",
        sizes=_SIZES,
    ),
    _rejected("weights that are an output", _channels(outputs=", float[P,5,3] w"), sizes=_SIZES),
]
ONE_HEAD_CASES = [
    _case("one head", _tokens(_PLAIN), ops=_ONE),
    _case(
        "one head, weights behind the values",
        _tokens("w = Softmax <axis = -1> (m)").replace(
            "y = MatMul (w, v)",
            "wt = Transpose <perm = [0, 2, 1]> (w)  vt = Transpose <perm = [0, 2, 1]> (v)"
            "  z = MatMul (vt, wt)  y = Transpose <perm = [0, 2, 1]> (z)",
        ),
        ops=_ONE,
    ),
    _case("one head and a mask", _tokens("e = Add (m, b)  w = Softmax <axis = -1> (e)", ", float[S,L] b"), ops=_ONE),
    _rejected(
        "one head and a mask a batch entry",
        _tokens("e = Add (m, b)  w = Softmax <axis = -1> (e)", ", float[B,S,L] b"),
        rejection="differs between batch entries",
    ),
    _rejected(
        "one head, batches that may differ",
        _tokens(_PLAIN).replace("float[B,L,6] v", "float[P,L,6] v"),
        rejection="differ in batch",
        sizes=_TOKENS | {"P": 2},
    ),
    _rejected("one head, weights that are an output", _tokens(_PLAIN, outputs=", float[B,S,L] w")),
]
PASS = rule_pass("one_head", ONE_HEAD_RULES, ONE_HEAD_CASES)
