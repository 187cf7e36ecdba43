"""Attention as ai.onnx Attention (opset 23), on 4-D tensors or [B,S,N*D], causal or not, with any number of keys."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from onnxscript.rewriter.pattern import Var

from fusion_passes import DOMAIN
from fusion_passes import value_queries as values
from fusion_passes.canonicalize.attention.masks import ZERO_ROWS, mask_mismatch
from fusion_passes.canonicalize.attention.matmul_softmax import case_graph
from fusion_passes.graph_edits import unique_name
from fusion_passes.graph_pass import case_makers
from fusion_passes.rule import Rule, rule_pass


class FromAttention(Rule):
    """ai.onnx Attention (opset 23) with one output => SDPA

    A boolean mask becomes 0 for True and the lowest finite value for False, as torch.onnx writes it below opset 23.
    The output of a row without True is 0, as in ONNX Runtime: a factor of 0, unless the mask is constant without one.
    Heads are split from three axes, and those of keys are repeated if there are fewer of them than of queries.
    """

    def pattern(self, op: Any, q: Any, k: Any, v: Any) -> Any:
        return op.Attention(q, k, v, Var("mask", can_match_none=True), _outputs=["out"])

    def reject_reason(self, q: ir.Value, k: ir.Value, v: ir.Value, out: ir.Value, mask: ir.Value | None) -> str | None:
        node = values.producer(out)
        if any(x is not None for x in node.inputs[4:]) or len(node.outputs) > 1:
            return "it has a key-value cache"
        shapes = [_heads(node, index) for index in range(3)]
        query, key, value = (shape or [] for shape in shapes)
        if any(shape is None for shape in shapes) or not isinstance(query[3], int):
            return "query, key and value have neither four axes nor three, with a known head size"
        if query[0] != key[0] or key[:2] != value[:2] or (query[1] != key[1] and _groups(query, key) is None):
            return f"query, key and value differ in batch or heads: {query[:2]}, {key[:2]}, {value[:2]}"
        if query[1] != key[1] and not isinstance(value[3], int):
            return "the head size of the value is unknown"
        if mask is not None and (reason := mask_mismatch(mask, q, key[2], mask, query[:3])):
            return reason
        if mask is not None and mask.dtype not in (ir.DataType.BOOL, q.dtype):
            return "the mask and the scores differ in dtype"
        if node.attributes.get_int("qk_matmul_output_mode", 0):
            return "it returns the scores"
        if mask is not None and mask.dtype == ir.DataType.BOOL and node.attributes.get_int("is_causal", 0) == 1:
            return "it is causal and has a boolean mask, so that rows may be masked as a whole"
        return None

    def rewrite(self, op: Any, q: ir.Value, k: ir.Value, v: ir.Value, out: ir.Value, mask: ir.Value | None) -> Any:
        node = values.producer(out)
        query, key, value = (_heads(node, index) or [] for index in range(3))

        def ints(numbers: list[Any], name: str) -> ir.Value:
            return op.initializer(ir.tensor(np.array(numbers, np.int64)), name=unique_name(out, name))

        if values.rank(q) == 3:
            shapes = [ints([0, 0, shape[1], -1], name) for shape, name in ((query, "query"), (key, "key"))]
            q, k, v = (
                op.Transpose(op.Reshape(x, shapes[index > 0]), perm=[0, 2, 1, 3]) for index, x in enumerate((q, k, v))
            )
        groups = _groups(query, key)
        if groups is not None:
            many, after = ints([1, 1, groups, 1, 1], "groups"), ints([2], "group_axis")
            k, v = (
                op.Reshape(op.Expand(op.Unsqueeze(x, after), many), ints([0, query[1], -1, shape[3]], f"heads_{name}"))
                for x, shape, name in ((k, key, "key"), (v, value, "value"))
            )
        assert isinstance(query[3], int)
        scale = node.attributes.get_float("scale", query[3] ** -0.5)
        attributes = {"scale": scale, "is_causal": node.attributes.get_int("is_causal", 0)}
        if softcap := node.attributes.get_float("softcap", 0.0):
            attributes["softcap"] = softcap
        inputs, boolean = [q, k, v], mask is not None and mask.dtype == ir.DataType.BOOL
        dtype = node.inputs[0].dtype or ir.DataType.FLOAT  # type: ignore[union-attr]
        if boolean:
            keep, drop = (op.initializer(ir.tensor(np.array(x, dtype.numpy())), name=unique_name(out, name))
                          for x, name in ((0, "keep"), (ml_dtypes.finfo(dtype.numpy()).min, "drop")))  # fmt: skip
            inputs.append(op.Where(mask, keep, drop))
        elif mask is not None:
            inputs.append(mask)
        result = op.ScaledDotProductAttention(*inputs, **attributes, _domain=DOMAIN)
        if mask is not None:
            result.producer().metadata_props[ZERO_ROWS] = "1"
        if boolean and mask is not None and not _every_row_has_true(mask):
            last = op.initializer(ir.tensor(np.array([-1], np.int64)), name=unique_name(out, "last"))
            result = op.Mul(result, op.ReduceMax(op.Cast(mask, to=dtype), last, keepdims=1))
        if values.rank(node.inputs[0]) == 4:
            return result
        return op.Reshape(op.Transpose(result, perm=[0, 2, 1, 3]), ints([0, 0, -1], "merged"))


def _heads(node: ir.Node, index: int) -> list[int | str] | None:
    """Return the shape [B,N,S,D] of input `index` of an Attention on four axes or three, or None."""
    shape, many = (
        values.dims(node.inputs[index]) or [],
        node.attributes.get_int("kv_num_heads" if index else "q_num_heads"),
    )
    if len(shape) == 4:
        return shape
    if len(shape) != 3 or not many or not isinstance(shape[2], int) or shape[2] % many:
        return None
    return [shape[0], many, shape[1], shape[2] // many]


def _groups(query: list[int | str], key: list[int | str]) -> int | None:
    """Return the number of query heads of a key head, or None if it is 1 or unknown."""
    many, few = query[1], key[1]
    if not isinstance(many, int) or not isinstance(few, int) or many == few or many % few:
        return None
    return many // few


def _every_row_has_true(mask: ir.Value) -> bool:
    array = values.constant(mask)
    return array is not None and bool(array.any(-1).all())


class MergeHeadsFirst(Rule):
    """Mul(SDPA, [B,1,S,1]) -> Transpose -> Reshape to [B,S,H*D]  =>  SDPA -> Transpose -> Reshape -> Mul([B,S,1])

    Fusions find the merge of the heads next to the attention.
    """

    def pattern(self, op: Any, attention: Any, rows: Any, shape: Any) -> Any:
        transposed = op.Transpose(op.Mul(attention, rows), perm=[0, 2, 1, 3])
        return op.Reshape(transposed, shape, _outputs=["out"])

    def reject_reason(self, attention: ir.Value, rows: ir.Value, shape: ir.Value, out: ir.Value) -> str | None:
        node = attention.producer()
        if node is None or node.op_type != "ScaledDotProductAttention":
            return "it multiplies no attention"
        axes = values.dims(rows)
        if axes is None or len(axes) != 4 or axes[1] != 1 or axes[3] != 1 or values.rank(out) != 3:
            return "heads or channels have factors of their own"
        return None

    def rewrite(self, op: Any, attention: ir.Value, rows: ir.Value, shape: ir.Value, out: ir.Value) -> Any:
        merged = op.Reshape(op.Transpose(attention, perm=[0, 2, 1, 3]), shape)
        heads = op.initializer(ir.tensor(np.array([1], np.int64)), name=unique_name(out, "heads"))
        return op.Mul(merged, op.Squeeze(rows, heads))


RULES = (FromAttention, MergeHeadsFirst)


_SIZES = {"B": 2, "S": 5, "L": 3}
_ONE = {"ScaledDotProductAttention": 1, "Softmax": 0, "MatMul": 0}
_case, _rejected = case_makers(_SIZES)
CASES = [
    _case(
        "operator with a float mask",
        case_graph("y = Attention (q, k, v, m)", ", float[S,L] m", opset=23),
        ops=_ONE,
        sizes={"B": 2, "S": 5, "L": 7},
    ),
    _case(
        "operator with fewer key heads",
        """<ir_version: 10, opset_import: ["" : 23]>
        g (float[B,4,S,4] q, float[B,2,L,4] k, float[B,2,L,3] v) => (float[B,4,S,3] y) { y = Attention (q, k, v) }""",
        ops=_ONE | {"Expand": 2},
    ),
    _rejected(
        "operator with an unknown number of key heads",
        """<ir_version: 10, opset_import: ["" : 23]>
        g (float[B,4,S,4] q, float[B,N,L,4] k, float[B,N,L,4] v) => (float[B,4,S,4] y) { y = Attention (q, k, v) }""",
        rejection="differ in batch or heads",
        sizes=_SIZES | {"N": 2},
    ),
    _case(
        "operator on three axes, with fewer key heads and a mask",
        """<ir_version: 10, opset_import: ["" : 23]>
        g (float[B,S,16] q, float[B,L,8] k, float[B,L,6] v, bool[B,1,S,L] m) => (float[B,S,12] y) {
            y = Attention <q_num_heads = 4, kv_num_heads = 2, scale = 0.3> (q, k, v, m) }""",
        rewrites=2,
        ops=_ONE | {"Expand": 2, "ReduceMax": 1},
        sizes=_SIZES | {"L": 7},
    ),
    _case(
        "operator that caps its scores",
        case_graph("y = Attention <softcap = 2.0> (q, k, v, m)", ", float[S,L] m", opset=23),
        ops=_ONE,
        sizes={"B": 2, "S": 5, "L": 7},
    ),
    _rejected(
        "operator whose keys grow from a cache",
        """<ir_version: 10, opset_import: ["" : 23]>
        g (float[B,2,S,4] q, float[B,2,S,4] k, float[B,2,S,4] v, float[B,2,P,4] pk, float[B,2,P,4] pv)
            => (float[B,2,S,4] y, float[B,2,T,4] nk, float[B,2,T,4] nv) {
            y, nk, nv = Attention (q, k, v, , pk, pv) }""",
        sizes={"B": 2, "S": 3, "P": 2},
    ),
    _case("operator of opset 23", case_graph("y = Attention (q, k, v)", opset=23), ops=_ONE),
    _case(
        "causal operator",
        case_graph("y = Attention <is_causal = 1, scale = 0.3> (q, k, v)", opset=23),
        ops=_ONE,
        sizes={"B": 2, "S": 4, "L": 4},
    ),
    _case(
        "operator with a boolean mask",
        case_graph("y = Attention (q, k, v, keep)", ", bool[B,1,S,L] keep", opset=23),
        ops=_ONE | {"Where": 1, "ReduceMax": 1, "Mul": 1},
        sizes={"B": 2, "S": 5, "L": 7},
    ),
    _rejected(
        "causal operator with a boolean mask",
        case_graph("y = Attention <is_causal = 1> (q, k, v, keep)", ", bool[B,1,S,L] keep", opset=23),
        sizes={"B": 2, "S": 5, "L": 5},
        rejection="masked as a whole",
    ),
    _case(
        "operator with a constant boolean mask without empty rows",
        case_graph(
            "keep = Constant <value = bool[5,3] {1,0,0, 0,1,0, 1,1,0, 0,0,1, 1,1,1}> ()  y = Attention (q, k, v, keep)",
            opset=23,
        )
        .replace(",S,", ",5,")
        .replace(",L,", ",3,"),
        ops=_ONE | {"ReduceMax": 0, "Mul": 0},
    ),
    _case(
        "operator with a boolean mask whose heads are merged",
        case_graph(
            "o = Attention (q, k, v, keep)  t = Transpose <perm = [0, 2, 1, 3]> (o)  "
            "s = Constant <value_ints = [0, 0, 8]> ()  h = Reshape (t, s)  y = Neg (h)",
            ", bool[B,1,S,L] keep",
            opset=23,
        ).replace("(float[B,2,S,4] y", "(float[B,S,8] y"),
        rewrites=2,
        ops=_ONE | {"ReduceMax": 1, "Mul": 1, "Squeeze": 0, "Reshape": 2},
        sizes={"B": 2, "S": 5, "L": 7},
    ),
]

PASS = rule_pass("attention", RULES, CASES)
