"""MultiHeadAttention: fuses head split, attention and head merge to one node on [B,S,N*D] tensors.

    Reshape(q -> [B,S,N,D]) -> Transpose 0213 --+
    Reshape(k -> [B,L,N,D]) -> Transpose 0213 --+-> SDPA(mask?; scale) -> Transpose 0213 -> Reshape [B,S,N*E]
    Reshape(v -> [B,L,N,E]) -> Transpose 0213 --+
        =>  MultiHeadAttention(q, k, v, -, -, mask; num_heads=N, scale)

If batch and sequence are merged too, as for GPT-2's Gemm, the Reshape to [B*S,N*E] stays behind the attention.
Several attentions may share a split query, as the text and image attentions of an IP-Adapter do. Each reads the unsplit
query, and the split is removed with the last one. Rejected: other head splits, different numbers of heads, batches that
may differ, other consumers of the heads. The kernels require a mask of [1 or B, 1 or N, S, L]; a mask that broadcasts
along S or L is expanded.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.pattern import Var

from fusion_passes import DOMAIN
from fusion_passes import value_queries as values
from fusion_passes.canonicalize.attention.masks import expand_mask
from fusion_passes.graph_edits import unique_name
from fusion_passes.graph_pass import case_makers
from fusion_passes.rule import Rule, rule_pass


class MultiHeadAttention(Rule):
    """Head split, SDPA and head merge => MultiHeadAttention"""

    remove_nodes = False

    def pattern(self, op: Any, q: Any, k: Any, v: Any, q4: Any, k4: Any, v4: Any, merged: Any) -> Any:
        query = op.Transpose(op.Reshape(q, q4, _outputs=["q_heads"]), perm=[0, 2, 1, 3])
        key = op.Transpose(op.Reshape(k, k4, _outputs=["k_heads"]), perm=[0, 2, 1, 3])
        value = op.Transpose(op.Reshape(v, v4, _outputs=["v_heads"]), perm=[0, 2, 1, 3])
        mask = Var("mask", can_match_none=True)
        heads = op.ScaledDotProductAttention(query, key, value, mask, _domain=DOMAIN, _outputs=["sdpa"])
        return op.Reshape(op.Transpose(heads, perm=[0, 2, 1, 3]), merged, _outputs=["out"])

    def reject_reason(
        self, q: ir.Value, k: ir.Value, v: ir.Value, q_heads: ir.Value, k_heads: ir.Value, v_heads: ir.Value,
        sdpa: ir.Value, out: ir.Value, mask: ir.Value | None, **_: Any,
    ) -> str | None:  # fmt: skip
        heads, node = values.size(q_heads, 2), values.producer(sdpa)
        if node.attributes.get_float("softcap", 0.0):
            return "it caps its scores"
        if heads is None:
            return "the number of heads is unknown"
        if not all(
            _only_attentions_consume(split) for split in (q_heads, k_heads, v_heads)
        ) or not _only_merge_consumes(sdpa):
            return "the split or merged heads have other consumers"
        for flat, split in ((q, q_heads), (k, k_heads), (v, v_heads)):
            before, after = values.dims(flat), values.dims(split)
            if before is None or after is None or len(before) != 3 or len(after) != 4 or before[:2] != after[:2]:
                return "a Reshape does not split [B,S,N*D] into heads"
            if after[2] != heads:
                return "query, key and value have different numbers of heads"
        merged, width = values.dims(out), values.size(v, 2)
        tokens = merged is not None and (
            len(merged) == 2 or (len(merged) == 3 and merged[:2] == (values.dims(q) or [])[:2])
        )
        if merged is None or not tokens or merged[-1] != width:
            return "the Reshape after attention does not merge the heads"
        batches = [(values.dims(x) or [])[:1] for x in (q, k, v)]
        if batches.count(batches[0]) != 3:
            return f"query, key and value may differ in batch: {batches}"
        return None if (values.dims(k) or [])[:2] == (values.dims(v) or [])[:2] else "key and value differ in length"

    def rewrite(
        self, op: Any, q: ir.Value, k: ir.Value, v: ir.Value, q_heads: ir.Value, sdpa: ir.Value,
        mask: ir.Value | None, out: ir.Value, **_: Any,
    ) -> Any:  # fmt: skip
        node = values.producer(sdpa)
        inputs = [q, k, v] + ([] if mask is None else [None, None, expand_mask(op, mask, q, k, sdpa)])
        attention = op.MultiHeadAttention(
            *inputs,
            num_heads=values.size(q_heads, 2),
            scale=node.attributes["scale"].as_float(),
            unidirectional=node.attributes.get_int("is_causal", 0),
            _domain=DOMAIN,
        )
        if values.rank(out) == 3:
            return attention
        rows = ir.tensor([-1, values.size(out, 1) or 0], dtype=ir.DataType.INT64)
        return op.Reshape(attention, op.initializer(rows, name=unique_name(sdpa, "rows")))


def _only_attentions_consume(heads: ir.Value) -> bool:
    """Return whether split heads, which are transposed, are consumed by attentions only."""
    transposed = [output for node in values.consumers(heads) for output in node.outputs]
    op_types = {node.op_type for value in transposed for node in values.consumers(value)}
    is_output = any(value.is_graph_output() for value in (heads, *transposed))
    return not is_output and op_types == {"ScaledDotProductAttention"}


def _only_merge_consumes(sdpa: ir.Value) -> bool:
    """Return whether the output of an attention is transposed and reshaped, and has no other consumers."""
    consumers = values.consumers(sdpa)
    transposed = consumers[0].outputs[0]
    is_output = sdpa.is_graph_output() or transposed.is_graph_output()
    return len(consumers) == len(values.consumers(transposed)) == 1 and not is_output


RULES = (MultiHeadAttention,)


def _graph(
    split: str = "0, 0, 2, 4", key_split: str = "0, 0, 2, 4", merge: str = "0, 0, 8", extra: str = "", mask: str = "",
    perm: str = "0, 2, 1, 3", outputs: str = "",
) -> str:  # fmt: skip
    return f"""<ir_version: 10, opset_import: ["" : 21, "sd_ort" : 1]>
        g (float[B,S,8] q, float[B,L,8] k, float[B,L,8] v {extra}) => (float[B,S,8] y {outputs})
        <int64[4] split = {{{split}}}, int64[4] ksplit = {{{key_split}}}, int64[3] merge = {{{merge}}},
         float s = {{0.45}}> {{
            q4 = Reshape (q, split)   qh = Transpose <perm = [{perm}]> (q4)
            k4 = Reshape (k, ksplit)  kh = Transpose <perm = [0, 2, 3, 1]> (k4)
            v4 = Reshape (v, ksplit)  vh = Transpose <perm = [0, 2, 1, 3]> (v4)
            scores = MatMul (qh, kh)  scaled = Mul (scores, s)
            {"masked = Add (scaled, m)" if mask else "masked = Identity (scaled)"}
            w = Softmax <axis = -1> (masked)
            a = MatMul (w, vh)        t = Transpose <perm = [0, 2, 1, 3]> (a)
            y = Reshape (t, merge)
        }}"""


def _shared(more: str = "", outputs: str = "") -> str:
    """A layer with an IP-Adapter: the sum of two attentions with one query, to text and to image tokens."""
    images = """
            k4p = Reshape (kp, ksplit)  khp = Transpose <perm = [0, 2, 3, 1]> (k4p)
            v4p = Reshape (vp, ksplit)  vhp = Transpose <perm = [0, 2, 1, 3]> (v4p)
            scoresp = MatMul (qh, khp)  scaledp = Mul (scoresp, s)  wp = Softmax <axis = -1> (scaledp)
            ap = MatMul (wp, vhp)       tp = Transpose <perm = [0, 2, 1, 3]> (ap)
            yp = Reshape (tp, merge)    y = Add (yt, yp)
        """
    graph = _graph(extra=", float[B,P,8] kp, float[B,P,8] vp", outputs=outputs)
    return graph.replace("y = Reshape (t, merge)", f"yt = Reshape (t, merge){images}{more}")


_SIZES = {"B": 2, "S": 5, "L": 3}
_ONE = {"MultiHeadAttention": 1, "Transpose": 0, "Reshape": 0, "Softmax": 0}
_case, _rejected = case_makers(_SIZES)
CASES = [
    _case("cross-attention", _graph(), ops=_ONE),
    _case("mask kept", _graph(extra=", float[B,1,S,L] m", mask="m"), ops=_ONE),
    _case("mask of two axes", _graph(extra=", float[S,L] m", mask="m"), ops=_ONE),
    _case(
        "scaled projection",
        _graph().replace("Reshape (q, split)", "Reshape (qs, split)").replace("q4 =", "qs = Mul (q, s)  q4 ="),
        ops=_ONE | {"Mul": 0},
    ),
    _case(
        "projection scaled a channel",
        _graph()
        .replace("Reshape (q, split)", "Reshape (qs, split)")
        .replace("q4 =", "qs = Mul (q, w8)  q4 =")
        .replace("float s =", "float[8] w8, float s ="),
        ops=_ONE | {"Mul": 1},
    ),
    _case(
        "scaled projection is an output",
        _graph(outputs=", float[B,S,8] qs")
        .replace("Reshape (q, split)", "Reshape (qs, split)")
        .replace("q4 =", "qs = Mul (q, s)  q4 ="),
        ops=_ONE | {"Mul": 1},
    ),
    _case("mask a key", _graph(extra=", float[B,1,1,L] m", mask="m"), ops=_ONE | {"Expand": 1}),
    _case("mask of three axes", _graph(extra=", float[2,S,L] m", mask="m"), ops=_ONE | {"Unsqueeze": 1}),
    _case("mask of one axis", _graph(extra=", float[L] m", mask="m"), ops=_ONE | {"Expand": 1}),
    _rejected("softmax over queries", _graph().replace("Softmax <axis = -1>", "Softmax <axis = 2>")),
    _rejected(
        "key head of another size than the query's, transposed away",
        _graph(key_split="0, 0, 4, 2", merge="0, -1, 8")
        .replace("kh = Transpose <perm = [0, 2, 3, 1]>", "kh = Transpose <perm = [0, 3, 2, 1]>")
        .replace("vh = Transpose <perm = [0, 2, 1, 3]>", "vh = Transpose <perm = [0, 3, 1, 2]>"),
    ),
    _rejected("scale that is not a constant", _graph(extra=", float n").replace("Mul (scores, s)", "Mul (scores, n)")),
    _case(
        "merged to rows of a Gemm",
        _graph(merge="-1, 8").replace("int64[3] merge", "int64[2] merge").replace("float[B,S,8] y", "float[R,8] y"),
        ops=_ONE | {"Reshape": 1},
    ),
    _rejected(
        "merged to rows of half a head",
        _graph(merge="-1, 4").replace("int64[3] merge", "int64[2] merge").replace("float[B,S,8] y", "float[R,4] y"),
        rejection="does not merge the heads",
    ),
    _case("one head", _graph("0, 0, 1, 8", "0, 0, 1, 8"), ops=_ONE),
    _rejected("split heads are an output", _graph(outputs=", float[B,S,2,4] q4"), rejection="other consumers"),
    _rejected("merged heads are an output", _graph(outputs=", float[B,S,2,4] t"), rejection="other consumers"),
    _case("text and pictures", _shared(), 2, _ONE | {"MultiHeadAttention": 2, "Add": 1}, sizes=_SIZES | {"P": 4}),
    _case(
        "text and pictures, the query scaled",
        _shared().replace("qh = Tr", "qu = Tr").replace("kh = ", "qh = Mul (qu, s)  kh = ", 1),
        2,
        _ONE | {"MultiHeadAttention": 2, "Add": 1, "Mul": 0},
        sizes=_SIZES | {"P": 4},
    ),
    _rejected(
        "text and pictures, and heads that are read apart",
        _shared("z = Relu (qh)", ", float[B,2,S,4] z"),
        rejection="other consumers",
        sizes=_SIZES | {"P": 4},
    ),
    _rejected(
        "heads merged with positions",
        _graph(merge="0, -1, 8", perm="0, 1, 2, 3", split="0, 2, -1, 4"),
        sizes={"B": 2, "S": 4, "L": 3},
    ),
]

PASS = rule_pass("multi_head_attention", RULES, CASES)
