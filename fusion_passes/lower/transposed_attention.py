"""Lowers attention on [B,N,S,D] to MultiHeadAttention between transposes, for targets with a kernel for tokens only.

    ScaledDotProductAttention(q, k, v, mask?)
        =>  Transpose(Reshape(MultiHeadAttention(*Reshape(Transpose(q, k, v)), -, -, mask)))

with kv_num_heads instead of repeated heads of k and v. The scores [B,N,S,L] are then not in memory. Transposes cancel
with those around the attention. Rejected: capped scores, heads that the kernel's tiles do not support.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.pattern import Var

from fusion_passes import DOMAIN
from fusion_passes import value_queries as values
from fusion_passes.canonicalize import transposes
from fusion_passes.canonicalize.attention.masks import expand_mask
from fusion_passes.graph_edits import unique_name
from fusion_passes.graph_pass import Pass, PassCase, PassOutcome
from fusion_passes.repeated_heads import kv_before_repetition, kv_head_count
from fusion_passes.rule import Rule, apply_rules

SWAP = [0, 2, 1, 3]
MAX_HEAD = 512  # of the kernel's tiles, in multiples of 8


class TransposedAttention(Rule):
    """SDPA => MultiHeadAttention between transposes"""

    def pattern(self, op: Any, q: Any, k: Any, v: Any) -> Any:
        mask = Var("mask", can_match_none=True)
        return op.ScaledDotProductAttention(q, k, v, mask, _domain=DOMAIN, _outputs=["out"])

    def reject_reason(self, q: ir.Value, v: ir.Value, out: ir.Value, **_: Any) -> str | None:
        node, size = values.producer(out), values.size(q, 3)
        if node.attributes.get_float("softcap", 0.0):
            return "it caps its scores"
        if size is None or values.size(q, 1) is None or size != values.size(v, 3):
            return "query and value differ in head size, or their number is unknown"
        return f"its kernel has no heads of {size}" if size % 8 or size > MAX_HEAD else None

    def rewrite(self, op: Any, q: ir.Value, k: ir.Value, v: ir.Value, out: ir.Value, mask: ir.Value | None) -> Any:
        node, (heads, size) = values.producer(out), (values.static_size(q, 1), values.static_size(q, 3))
        flat, split = (
            op.initializer(ir.tensor(target, dtype=ir.DataType.INT64), name=unique_name(out, name))
            for target, name in (([0, 0, -1], "flat"), ([0, 0, heads or 0, size or 0], "split"))
        )
        assert isinstance(node.graph, ir.Graph)
        kv_heads, keys = kv_head_count(node, 1), kv_before_repetition(node.graph, node, 1)
        inputs = [op.Reshape(op.Transpose(x, perm=SWAP), flat) for x in (q, *keys)]
        attention = op.MultiHeadAttention(
            *inputs,
            *([] if mask is None else [None, None, expand_mask(op, mask, q, k, out, 2)]),
            num_heads=heads,
            **({} if kv_heads is None else {"kv_num_heads": kv_heads}),
            scale=node.attributes["scale"].as_float(),
            unidirectional=node.attributes.get_int("is_causal", 0),
            _domain=DOMAIN,
        )
        return op.Transpose(op.Reshape(attention, split), perm=SWAP)


def transposed_attention(model: ir.Model) -> PassOutcome:
    """Rewrite the attentions of `model` in place."""
    outcome = apply_rules(model, (TransposedAttention,), "transposed_attention")
    if outcome.counts.total():
        transposes.PASS.run(model)
    return outcome


def _case(
    name: str, inputs: str, ops: dict[str, int] | None = None, rejection: str | None = None, body: str = "",
    **attributes: Any,
) -> PassCase:  # fmt: skip
    size, scale = attributes.pop("size", 8), {"scale": 0.3, "is_causal": 0} | attributes
    graph = f"""<ir_version: 10, opset_import: ["" : 21, "sd_ort" : 1]>
        g (float[B,2,S,{size}] q, float[B,2,L,{size}] k, float[B,2,L,{size}] v, float[B,1,S,L] m, float[B,1,1,L] row)
          => (float[B,2,S,{size}] y)
        <int64[1] at2 = {{2}}, int64[5] by2 = {{1, 1, 2, 1, 1}}, int64[4] all = {{0, 2, -1, {size}}}> {{
            {body}
            y = sd_ort.ScaledDotProductAttention <{", ".join(f"{n} = {x}" for n, x in scale.items())}> ({inputs})
        }}"""
    rewrites = int(rejection is None)
    return PassCase(name, graph, rewrites, {"MultiHeadAttention": rewrites} | (ops or {}), rejection, _SIZES)


def _repeated(name: str) -> str:
    """Statements that repeat the first of the two heads of `name` as {name}r."""
    return f"""  {name}1, {name}2 = Split <axis = 1, num_outputs = 2> ({name})  {name}5 = Unsqueeze ({name}1, at2)
        {name}e = Expand ({name}5, by2)  {name}r = Reshape ({name}e, all)"""


_SIZES = {"B": 2, "S": 5, "L": 3}
CASES = [
    _case("four axes", "q, k, v", {"Transpose": 4, "Reshape": 4}),
    _case("causal", "q, k, v", is_causal=1),
    _case("a mask", "q, k, v, m", {"Expand": 0}),
    _case("a mask a key", "q, k, v, row", {"Expand": 1}),
    _case("one head of keys", "q, kr, vr", {"Expand": 0, "Reshape": 4}, body=_repeated("k") + _repeated("v")),
    _case("one head of keys alone", "q, kr, v", {"Expand": 1}, body=_repeated("k")),
    _case("capped scores", "q, k, v", rejection="caps", softcap=2.0),
    _case("heads of 6", "q, k, v", rejection="no heads of 6", size=6),
]

PASS = Pass("transposed_attention", transposed_attention, CASES)
