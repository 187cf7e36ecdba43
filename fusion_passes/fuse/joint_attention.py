"""Attention of a diffusion transformer: one MultiHeadAttention behind norm, rotary embedding and concatenation.

    q, k, v [B,N,S,D] -> SDPA(mask?; scale) -> Transpose 0213 -> Reshape [B,S,N*E]
        =>  MultiHeadAttention(tokens(q), tokens(k), tokens(v), -, -, mask; num_heads=N, scale)

`tokens` is the value with its axes as [B,S,N*D]. It needs no Transpose, since one is removed:

    Transpose(x [B,S,N,D], 0213)            x
    Concat(a, b; axis 2)                    Concat(tokens(a), tokens(b); axis 1): text and image in SD 3
    RMSNormalization(x, gamma [D])          RMSNormalization(tokens(x), gamma): QK norm in SD 3
    x [B,M,S,D] with repeated heads         tokens(x) with repeated heads: grouped-query attention

Rejected: capped scores, heads that come from another operator or have other consumers, batches and numbers of heads
that differ or are unknown, heads that are not merged. `multi_head_attention` runs before and fuses heads split from
[B,S,N*D].
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import onnx_ir as ir

from fusion_passes import DOMAIN
from fusion_passes import value_queries as values
from fusion_passes.cleanup import clean_up
from fusion_passes.graph_edits import new_initializer, replace_value, unique_name
from fusion_passes.graph_pass import Pass, PassCase, PassOutcome, rewrite_nodes
from fusion_passes.repeated_heads import heads_before_repetition
from fusion_passes.shapes.infer import annotate_new

SWAP = [0, 2, 1, 3]


def _not_tokens(value: ir.Value | None) -> str | None:
    """Return why a value [B,N,S,D] has no form [B,S,N,D] without a Transpose, or None."""
    node = None if value is None else value.producer()
    if value is None or node is None:
        return "heads are an input of the graph"
    if values.perm(value) == SWAP:
        return None
    if len(values.consumers(value)) > 1 or value.is_graph_output():
        return "the heads have other consumers"
    if (single := heads_before_repetition(value, 1)) is not None:
        return _not_tokens(single)
    if node.op_type == "Concat" and not node.domain:
        if node.attributes["axis"].as_int() not in (2, -2):
            return "the heads are not concatenated along the sequence"
        return next(filter(None, map(_not_tokens, node.inputs)), None)
    if node.op_type == "RMSNormalization" and not node.domain:
        if node.attributes.get_int("axis", -1) not in (3, -1) or values.rank(node.inputs[1]) != 1:
            return "the heads are normalized over several axes"
        return _not_tokens(node.inputs[0])
    return f"{node.op_type} computes the heads"


def _tokens(graph: ir.Graph, value: ir.Value | None, before: ir.Node) -> ir.Value:
    """Return a value [B,N,S,D], for which `_not_tokens` is None, as [B,S,N,D]; new nodes are inserted at `before`."""
    assert value is not None
    node = values.producer(value)
    if values.perm(value) == SWAP:
        assert node.inputs[0] is not None
        return node.inputs[0]
    if (single := heads_before_repetition(value, 1)) is not None:
        return _repeated_tokens(graph, _tokens(graph, single, before), value, before)
    if node.op_type == "Concat":
        inputs: list[ir.Value | None] = [_tokens(graph, part, before) for part in node.inputs]
        new = ir.node("Concat", inputs, {"axis": 1})
    else:
        attributes = {name: node.attributes[name].value for name in node.attributes}
        new = ir.node("RMSNormalization", [_tokens(graph, node.inputs[0], before), *node.inputs[1:]], attributes)
    new.metadata_props.update(node.metadata_props)
    output, shape = new.outputs[0], values.dims(value) or []
    output.name, output.type = f"{value.name}.tokens", value.type
    output.shape = ir.Shape([shape[axis] for axis in SWAP])
    graph.insert_before(before, new)
    return output


def _repeated_tokens(graph: ir.Graph, tokens: ir.Value, value: ir.Value, before: ir.Node) -> ir.Value:
    """Return `tokens` [B,S,M,D] as [B,S,N,D], with each head repeated; `value` is [B,N,S,D]."""
    batch, sequence, heads, size = values.dims(tokens) or []
    many = values.size(value, 1) or 0
    assert isinstance(heads, int)
    sizes = (([0, 0, heads, 1, size], [batch, sequence, heads, 1, size]),
             ([1, 1, 1, many // heads, 1], [batch, sequence, heads, many // heads, size]),
             ([0, 0, many, size], [batch, sequence, many, size]))  # fmt: skip
    for op_type, (target, shape) in zip(("Reshape", "Expand", "Reshape"), sizes, strict=True):
        name = unique_name(value, "repeated")
        node = ir.node(op_type, [tokens, new_initializer(graph, name, np.array(target, np.int64))])
        node.outputs[0].name, node.outputs[0].type = f"{name}.tokens", value.type
        node.outputs[0].shape = ir.Shape(shape)
        graph.insert_before(before, node)
        tokens = node.outputs[0]
    return tokens


def _merge(node: ir.Node) -> ir.Node | None:
    """Return the Reshape of Transpose(attention, 0213) to [B,S,N*E], or None."""
    heads = node.outputs[0]
    if heads.is_graph_output() or len(values.consumers(heads)) != 1:
        return None
    transposed = values.consumers(heads)[0].outputs[0]
    if values.perm(transposed) != SWAP or transposed.is_graph_output() or len(values.consumers(transposed)) != 1:
        return None
    reshape = values.consumers(transposed)[0]
    before, after = values.dims(heads) or [], values.dims(reshape.outputs[0]) or []
    if reshape.op_type != "Reshape" or len(before) != 4 or len(after) != 3 or after[0] != before[0]:
        return None
    heads_number, width = before[1], before[3]
    if not isinstance(heads_number, int) or not isinstance(width, int) or after[2] != heads_number * width:
        return None
    return reshape  # with batch and width as before, the axis between has the size of the sequence


def _reject_reason(node: ir.Node) -> str | None:
    if node.attributes.get_float("softcap", 0.0):
        return "it caps its scores"
    for value in node.inputs[:3]:
        if reason := _not_tokens(value):
            return reason
    q, k, v = (values.dims(value) or [] for value in node.inputs[:3])
    if not len(q) == len(k) == len(v) == 4 or not all(isinstance(n, int) for n in (q[1], q[3], v[3])):
        return "the number or the size of the heads is unknown"
    if not q[:2] == k[:2] == v[:2] or k[2] != v[2]:
        return f"query, key and value differ in batch, heads or length: {q[:2]}, {k[:3]}, {v[:3]}"
    if len(node.inputs) > 3 and values.dims(node.inputs[3]) is not None:
        mask = values.dims(node.inputs[3]) or []
        if len(mask) != 4 or mask[2:] != [q[2], k[2]]:
            return "the mask is not [1 or B,1 or N,S,L]"
    return None if _merge(node) else "the heads are not merged to [B,S,N*E]"


def _width(shape: Sequence[int | str]) -> int | None:
    """Return N*D of a shape [B,S,N,D]."""
    heads, size = shape[2:]
    return heads * size if isinstance(heads, int) and isinstance(size, int) else None


def _rewrite(graph: ir.Graph, node: ir.Node) -> None:
    reshape = _merge(node)
    assert reshape is not None
    out = reshape.outputs[0]
    inputs: list[ir.Value | None] = []
    for value in node.inputs[:3]:
        heads = _tokens(graph, value, node)
        shape = values.dims(heads) or []
        view, flat_shape = heads.producer(), [*shape[:2], _width(shape)]
        if view is not None and view.op_type == "Reshape" and values.dims(view.inputs[0]) == flat_shape:
            inputs.append(view.inputs[0])
            continue
        if heads_before_repetition(heads, 2) is not None:
            assert view is not None
            assert view.inputs[0] is not None
            heads = view.inputs[0]  # [B,S,M,g,D]: one Reshape to [B,S,N*D]
        target = new_initializer(graph, unique_name(node.outputs[0], "tokens"), [0, 0, -1])
        flat = ir.node("Reshape", [heads, target])
        flat.outputs[0].name, flat.outputs[0].type = f"{unique_name(node.outputs[0], 'flat')}{len(inputs)}", heads.type
        flat.outputs[0].shape = ir.Shape(flat_shape)
        graph.insert_before(node, flat)
        inputs.append(flat.outputs[0])
    mask = [None, None, node.inputs[3]] if len(node.inputs) > 3 and node.inputs[3] is not None else []
    attributes = {
        "num_heads": values.size(node.inputs[0], 1),
        "scale": node.attributes["scale"].as_float(),
        "unidirectional": node.attributes.get_int("is_causal", 0),
    }
    fused = ir.node("MultiHeadAttention", [*inputs, *mask], attributes, domain=DOMAIN)
    fused.metadata_props.update(node.metadata_props)
    replace_value(graph, reshape, fused, out)
    graph.opset_imports.setdefault(DOMAIN, 1)


def joint_attention(model: ir.Model) -> PassOutcome:
    """Rewrite the attentions of `model` in place."""
    outcome = rewrite_nodes(model, "joint_attention", "ScaledDotProductAttention", _reject_reason, _rewrite)
    if outcome.counts.total():
        clean_up(model)
        annotate_new(model.graph)
    return outcome


def _graph(
    body: str, merge: str = "0, -1, 8", outputs: str = "", y: str = "B,S,8", perm: str = "0, 2, 1, 3", text: str = "T"
) -> str:
    return f"""<ir_version: 10, opset_import: ["" : 23, "sd_ort" : 1]>
        g (float[B,{text},2,4] q, float[B,{text},2,4] k, float[B,{text},2,4] v, float[B,I,2,4] qi, float[B,I,2,4] ki,
           float[B,I,2,4] vi) => (float[{y}] y {outputs})
        <int64[3] merge = {{{merge}}}, float[4] wq, float[4] wk, float[4] wi, float[3,4] rows, float scale = {{0.4}},
         float[1,1,1,4] c> {{
            {body}
            kt = Transpose <perm = [0, 1, 3, 2]> (kh)  s = MatMul (qh, kt)  f = Mul (s, scale)
            p = Softmax <axis = -1> (f)  a = MatMul (p, vh)
            t = Transpose <perm = [{perm}]> (a)  y = Reshape (t, merge)
        }}"""


def _heads(*names: str) -> str:
    return " ".join(f"{name}h = Transpose <perm = [0, 2, 1, 3]> ({name})" for name in names)


_FLUX = (
    "qn = RMSNormalization (q, wq)  kn = RMSNormalization (k, wk)  qin = RMSNormalization (qi, wi)"
    "  qc = Concat <axis = 1> (qn, qin)  kc = Concat <axis = 1> (kn, ki)  vc = Concat <axis = 1> (v, vi)"
    "  qr = Mul (qc, c)  qh = Transpose <perm = [0, 2, 1, 3]> (qr)  kh = Transpose <perm = [0, 2, 1, 3]> (kc)"
    "  vh = Transpose <perm = [0, 2, 1, 3]> (vc)"
)
_SD3 = (
    f"{_heads('qi', 'ki', 'vi')}  qt = Transpose <perm = [0, 2, 1, 3]> (q)  ktt = Transpose <perm = [0, 2, 1, 3]> (k)"
    "  vt = Transpose <perm = [0, 2, 1, 3]> (v)"
    "  qn = RMSNormalization <epsilon = 0.01> (qt, wq)  kn = RMSNormalization <epsilon = 0.02> (ktt, wk)"
    "  qin = RMSNormalization (qih, wi)  qh = Concat <axis = 2> (qin, qn)  kh = Concat <axis = 2> (kih, kn)"
    "  vh = Concat <axis = -2> (vih, vt)"
)
_TOKENS = """
    flat = Constant <value_ints = [0, 0, 8]> ()  split = Constant <value_ints = [0, 0, 2, 4]> ()
    q3 = Reshape (q, flat)  qr = Tanh (q3)  qs = Reshape (qr, split)
    k3 = Reshape (k, flat)  kr = Tanh (k3)  ks = Reshape (kr, split)
"""
_SIZES = {"B": 2, "T": 3, "I": 5, "S": 8}
_ONE = {"MultiHeadAttention": 1, "Transpose": 0, "Softmax": 0}


def _grouped_queries(heads: int, key_heads: int, five: tuple[int, ...], groups: tuple[int, ...]) -> str:
    """Attention whose keys and values are reshaped to `five` axes and expanded by `groups` to as many heads."""
    text = _graph(
        _heads("q", "k1", "v1").replace("k1h = ", "ks = ").replace("v1h = ", "vs = ")
        + " k5 = Reshape (ks, five)  ke = Expand (k5, groups)  kh = Reshape (ke, four)"
        "  v5 = Reshape (vs, five)  ve = Expand (v5, groups)  vh = Reshape (ve, four)",
        y=f"B,T,{4 * heads}",
        merge=f"0, -1, {4 * heads}",
    )
    for name, count in (("q", heads), ("k", key_heads), ("v", key_heads)):
        input_name = name if name == "q" else f"{name}1"
        text = text.replace(f"float[B,T,2,4] {name},", f"float[B,T,{count},4] {input_name},")
    axes = [
        f"int64[5] {name} = {{{', '.join(map(str, value))}}}" for name, value in (("five", five), ("groups", groups))
    ]
    constants = ", ".join([*axes, f"int64[4] four = {{0, {heads}, -1, 4}}"])
    return text.replace("<int64[3] merge", f"<{constants}, int64[3] merge")


_case = partial(PassCase, sizes=_SIZES, ops=_ONE)
_rejected = partial(PassCase, sizes=_SIZES, rewrites=0)
CASES = [
    _case("FLUX.1: norm, concatenation and a factor before the heads", _graph(_FLUX)),
    _case("SD 3: heads, norm, concatenation", _graph(_SD3)),
    _case(
        "tokens computed as [B,S,N*D], as rotary embeddings do",
        _graph(_TOKENS + _heads("qs", "ks", "v").replace("sh =", "h ="), y="B,T,8"),
        ops={**_ONE, "Reshape": 3},
    ),
    _case(
        "grouped queries: two of them for each key",
        _grouped_queries(2, 1, five=(0, 1, 1, -1, 4), groups=(1, 1, 2, 1, 1)),
        ops={**_ONE, "Expand": 2},
    ),
    _rejected(
        "each group of keys repeated as a whole",
        _grouped_queries(4, 2, five=(0, 1, 2, -1, 4), groups=(1, 2, 1, 1, 1)),
        rejection="Reshape computes the heads",
    ),
    _case("one stream", _graph(_heads("q", "k", "v"), y="B,T,8", merge="0, -1, 8")),
    _rejected("heads are an output", _graph(_SD3, outputs=", float[B,2,S,4] kh"), rejection="other consumers"),
    _rejected(
        "heads are scaled apart",
        _graph(_SD3.replace("kh = Concat", "kx = Concat") + "  kh = Tanh (kx)"),
        rejection="Tanh computes the heads",
    ),
    _rejected(
        "concatenated along the heads",
        _graph(_SD3.replace("axis = 2", "axis = 1").replace("axis = -2", "axis = 1"), y="B,T,16", merge="0, -1, 16"),
        rejection="not concatenated along the sequence",
        sizes=_SIZES | {"I": 3},
    ),
    _rejected(
        "a norm over tokens and channels",
        _graph(_SD3.replace("<epsilon = 0.01> (qt, wq)", "<axis = 2> (qt, rows)"), text="3"),
        rejection="several axes",
    ),
    _rejected("merged heads are an output", _graph(_FLUX, outputs=", float[B,S,2,4] t"), rejection="not merged"),
    _rejected(
        "tokens merged with heads",
        _graph(_FLUX, y="B,2,Z", perm="0, 1, 2, 3", merge="0, 2, -1"),
        rejection="not merged",
    ),
]

PASS = Pass("joint_attention", joint_attention, CASES)
