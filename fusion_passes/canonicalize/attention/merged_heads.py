"""Attention on [B*H,S,D] between Reshapes from and to [B,H,S,D] (diffusers before SDPA, old exports of Optimum).

MatMul, Softmax and MatMul as in `matmul_softmax`. A mask may be added between Reshapes to [B,H,S,L] and back.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.pattern import OrValue

from fusion_passes import DOMAIN
from fusion_passes import value_queries as values
from fusion_passes.canonicalize.attention.masks import mask_mismatch
from fusion_passes.canonicalize.attention.matmul_softmax import Sdpa
from fusion_passes.graph_pass import case_makers


class Sdpa3D(Sdpa):
    """MatMul, Softmax and MatMul on [B*H,S,D], between Reshapes from and to [B,H,S,D] => SDPA"""

    remove_nodes = False  # a Shape of the flat query may be the target of the flat key's Reshape

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

    def reject_reason(
        self, q: ir.Value, k_t: ir.Value, v: ir.Value, s: ir.Value | None, weights: ir.Value, out: ir.Value,
        mask: ir.Value | None = None, **rest: Any,
    ) -> str | None:  # fmt: skip
        reason = super().reject_reason(q=q, k_t=k_t, v=v, s=s, mask=None, zero=None, weights=weights)
        if reason:
            return reason
        length = (values.dims(k_t) or [])[2]
        if mask is not None and (reason := mask_mismatch(mask, q, length, v)):
            return reason
        if mask is not None and values.dims(rest["scores4"]) != [*(values.dims(q) or [])[:3], length]:
            return "the mask is not added on [B,H,S,L]"
        inside = [rest[name] for name in ("scores", "scores4", "scores3", "flat") if name in rest] + [weights]
        if any(len(values.data_consumers(x)) > 1 or x.is_graph_output() for x in inside):
            return "the scores, the weights or the result have other consumers"
        for x, flat in ((q, rest["q_flat"]), (k_t, rest["k_flat"]), (v, rest["v_flat"])):
            if len(values.dims(flat) or []) != 3 or (values.dims(flat) or [])[1:] != (values.dims(x) or [])[2:]:
                return "the Reshapes do not merge the batch and head axes"
        expected = [*(values.dims(q) or [])[:3], (values.dims(v) or [])[-1]]
        return None if values.dims(out) == expected else "the batch and head axes are not restored"

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
        scale = 1.0 if s is None else values.scalar(s)
        return op.ScaledDotProductAttention(*inputs, scale=scale, is_causal=0, _domain=DOMAIN)


class MaskedSdpa3D(Sdpa3D):
    """Sdpa3D with a mask that is added between Reshapes to [B,H,S,L] and back (CLIP before SDPA)."""

    def masked(self, op: Any, scores: Any, mask: Any, m3: Any, m4: Any) -> Any:
        total = op.Add(op.Reshape(scores, m4, _outputs=["scores4"]), mask)
        return op.Reshape(total, m3, _outputs=["scores3"])

    def reject_reason(self, **bindings: Any) -> str | None:
        three, four = values.dims(bindings["scores3"]), values.dims(bindings["scores4"])
        if three is None or four is None or len(three) != 3 or len(four) != 4 or three[1:] != four[2:]:
            return "the Reshapes around the mask do not split and merge the batch and head axes"
        return super().reject_reason(**bindings)


RULES = (Sdpa3D, MaskedSdpa3D)


def _flat(body: str, extra: str = "", outputs: str = "") -> str:
    """Attention on [B*H,S,D]. The Shape of the flat query is the target of the flat key, as in diffusers' baddbmm."""
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
_ONE = {"ScaledDotProductAttention": 1, "Softmax": 0, "MatMul": 0}
_case, _rejected = case_makers(_FLAT_SIZES)
CASES = [
    _case("batch and heads merged", _flat("w = Softmax <axis = -1> (m)"), ops=_ONE),
    _case("batch and heads merged, zeros added", _flat(_ADD_ZEROS), ops=_ONE | {"Add": 0}),
    _case(
        "batch and heads merged, a mask added in between",
        _flat(_ADD_MASK, ", float[B,1,S,S] real"),
        ops=_ONE | {"Add": 0},
    ),
    _rejected(
        "batch and heads merged, a mask a flat head",
        _flat("e = Add (m, real)  w = Softmax <axis = -1> (e)", ", float[P,S,S] real"),
    ),
    _rejected(
        "batch and heads merged, the mask added with heads first",
        _flat(_ADD_MASK.replace("(batch, two, s, s)", "(two, batch, s, s)"), ", float[2,1,S,S] real"),
        rejection="not those of the scores",
    ),
    _rejected("batch and heads merged, ones added", _flat(_ADD_ONES)),
    _rejected(
        "batch and heads merged, weights are an output",
        _flat("w = Softmax <axis = -1> (m)", outputs=", float[P,S,S] w"),
        rejection="other consumers",
    ),
]
