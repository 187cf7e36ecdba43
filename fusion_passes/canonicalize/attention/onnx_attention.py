"""Attention as ai.onnx Attention (opset 23) on 4-D tensors, causal or not."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter.pattern import Var

from fusion_passes import value_queries as values
from fusion_passes.canonicalize.attention.masks import batch_mismatch, mask_mismatch
from fusion_passes.graph_edits import unique_name
from fusion_passes.graph_pass import PassCase
from fusion_passes.operators.definition import DOMAIN
from fusion_passes.rule import Rule, rule_pass


class FromAttention(Rule):
    """ai.onnx Attention (opset 23) on [B,H,S,D] tensors with one output => SDPA

    A boolean mask becomes 0 for True and the lowest finite value for False, as torch.onnx writes it below opset 23.
    The two differ only in rows without True, whose result is undefined.
    """

    def pattern(self, op: Any, q: Any, k: Any, v: Any) -> Any:
        return op.Attention(q, k, v, Var("mask", can_match_none=True), _outputs=["out"])

    def reject_reason(self, q: ir.Value, k: ir.Value, v: ir.Value, out: ir.Value, mask: ir.Value | None) -> str | None:
        node = out.producer()
        assert node is not None
        if any(x is not None for x in node.inputs[4:]) or len(node.outputs) > 1:
            return "it has a key-value cache"
        shapes = [values.dims(x) or [] for x in (q, k, v)]
        if any(len(shape) != 4 for shape in shapes) or not isinstance(shapes[0][-1], int):
            return "query, key and value are not all 4-D with a known head size"
        if reason := batch_mismatch(*shapes):
            return reason
        if mask is not None and (reason := mask_mismatch(mask, q, shapes[1][2], mask)):
            return reason
        if mask is not None and mask.dtype not in (ir.DataType.BOOL, q.dtype):
            return "the mask and the scores differ in dtype"
        if node.attributes.get_float("softcap", 0.0) or node.attributes.get_int("qk_matmul_output_mode", 0):
            return "it caps or returns the scores"
        return None

    def rewrite(self, op: Any, q: ir.Value, k: ir.Value, v: ir.Value, out: ir.Value, mask: ir.Value | None) -> Any:
        node = out.producer()
        assert node is not None
        default = (values.size(q, -1) or 1) ** -0.5
        scale = node.attributes.get_float("scale", default)
        if mask is not None and mask.dtype == ir.DataType.BOOL:
            dtype = (q.dtype or ir.DataType.FLOAT).numpy()
            keep, drop = (op.initializer(ir.tensor(np.array(x, dtype)), name=unique_name(out, name))
                          for x, name in ((0, "keep"), (np.finfo(dtype).min, "drop")))  # fmt: skip
            mask = op.Where(mask, keep, drop)
        inputs = [q, k, v] + ([] if mask is None else [mask])
        causal = node.attributes.get_int("is_causal", 0)
        return op.ScaledDotProductAttention(*inputs, scale=scale, is_causal=causal, _domain=DOMAIN)


RULES = (FromAttention,)


def _graph(body: str, extra: str = "", outputs: str = "", opset: int = 21) -> str:
    return f"""<ir_version: 10, opset_import: ["" : {opset}]>
        g (float[B,2,S,4] q, float[B,2,L,4] k, float[B,2,L,4] v {extra}) => (float[B,2,S,4] y {outputs})
        <float a = {{0.7}}, float b = {{0.6}}, float z = {{0.0}}, float low = {{-3.0e38}}, float r = {{2.0}}> {{
            kt = Transpose <perm = [0, 1, 3, 2]> (k)
            {body}
        }}"""


_SIZES = {"B": 2, "S": 5, "L": 3}
_ONE = {"ScaledDotProductAttention": 1, "Softmax": 0, "MatMul": 0}
_case = partial(PassCase, sizes=_SIZES)
_rejected = partial(_case, rewrites=0)
CASES = [
    _case(
        "operator with a float mask",
        _graph("y = Attention (q, k, v, m)", ", float[S,L] m", opset=23),
        ops=_ONE,
        sizes={"B": 2, "S": 5, "L": 7},
    ),
    _rejected(
        "operator with fewer key heads",
        """<ir_version: 10, opset_import: ["" : 23]>
        g (float[B,4,S,4] q, float[B,2,L,4] k, float[B,2,L,4] v) => (float[B,4,S,4] y) { y = Attention (q, k, v) }""",
        rejection="differ in batch or heads",
    ),
    _rejected(
        "operator that caps its scores", _graph("y = Attention <softcap = 2.0> (q, k, v)", opset=23), rejection="caps"
    ),
    _rejected(
        "operator whose keys grow from a cache",
        """<ir_version: 10, opset_import: ["" : 23]>
        g (float[B,2,S,4] q, float[B,2,S,4] k, float[B,2,S,4] v, float[B,2,P,4] pk, float[B,2,P,4] pv)
            => (float[B,2,S,4] y, float[B,2,T,4] nk, float[B,2,T,4] nv) {
            y, nk, nv = Attention (q, k, v, , pk, pv) }""",
        sizes={"B": 2, "S": 3, "P": 2},
    ),
    _case("operator of opset 23", _graph("y = Attention (q, k, v)", opset=23), ops=_ONE),
    _case(
        "causal operator",
        _graph("y = Attention <is_causal = 1, scale = 0.3> (q, k, v)", opset=23),
        ops=_ONE,
        sizes={"B": 2, "S": 4, "L": 4},
    ),
    _case(
        "operator with a boolean mask",
        _graph("y = Attention (q, k, v, keep)", ", bool[B,1,S,L] keep", opset=23),
        ops=_ONE | {"Where": 1},
        sizes={"B": 2, "S": 5, "L": 7},
    ),
]

PASS = rule_pass("attention", RULES, CASES)
