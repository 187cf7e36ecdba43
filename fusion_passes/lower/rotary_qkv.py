"""Lowers the heads of a transformer's attention to RotaryQkv: one GEMM for each stream, and one pass over its heads.

    x -> MatMul + Add (q, k, v) -> RMSNormalization? (q, k) -> Concat of two streams? -> RotaryEmbedding? (q, k)
      -> MultiHeadAttention(q, k, v)
        =>  x -> MatMul(Wqkv) + Add -> Reshape [B,S,N,3,D], the same of the other stream
              -> RotaryQkv -> MultiHeadAttention(packed QKV)

for GPU libraries with that kernel. The packed weights are computed when the model is saved. Rejected: an attention with
a mask, or with fewer heads of keys than of queries (Krea 2's); heads that no linear layer computes; query, key and
value of different inputs, streams, rotations or epsilons; a projection, norm or rotation with other consumers; heads
that are neither normalized, rotated nor joined, which `pack_qkv` packs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import onnx_ir as ir

from fusion_passes import DOMAIN
from fusion_passes import value_queries as values
from fusion_passes.cleanup import clean_up
from fusion_passes.graph_edits import new_derived_initializer, new_initializer
from fusion_passes.graph_pass import Pass, PassCase, PassOutcome, rewrite_nodes
from fusion_passes.shapes.infer import annotate_new


@dataclass(frozen=True)
class Projection:
    """Heads x W + bias of one stream, RMS-normalized with the scale `gamma` if it is not None."""

    x: ir.Value
    weight: ir.Value
    bias: ir.Value | None
    gamma: ir.Value | None
    epsilon: float | None


@dataclass(frozen=True)
class Rotation:
    """Tables [S,D/2] by which pairs are turned."""

    cos: ir.Value
    sin: ir.Value
    interleaved: int


@dataclass(frozen=True)
class Heads:
    """Query, key or value: the projections of its streams in the order of their tokens."""

    streams: tuple[Projection, ...]
    rotation: Rotation | None


class _Unmatched(Exception):
    """Raised with the reason why heads cannot be computed by RotaryQkv."""


def _producer(value: ir.Value | None) -> ir.Node:
    """Return the node that computes a value for one consumer alone, through Reshapes of heads."""
    node = None if value is None else value.producer()
    if value is None or node is None:
        raise _Unmatched("its heads are an input or a constant")
    if len(list(value.uses())) != 1 or value.is_graph_output():
        raise _Unmatched("a projection, norm or rotation of its heads has other consumers")
    if node.op_type != "Reshape" or node.domain:
        return node
    shape, source = values.dims(value), values.dims(node.inputs[0])
    if shape is None or source is None or {len(shape), len(source)} - {3, 4} or shape[:2] != source[:2]:
        raise _Unmatched("a Reshape of its heads moves tokens")
    return _producer(node.inputs[0])


def _projection(value: ir.Value | None) -> Projection:
    node, gamma, epsilon = _producer(value), None, None
    if node.op_type == "RMSNormalization" and not node.domain:
        x, gamma = node.inputs[:2]
        if values.rank(x) != 4 or not values.last_axis(node.attributes.get_int("axis", -1), x):
            raise _Unmatched("its heads are normalized over several axes")
        if not values.is_vector(gamma, values.size(x, -1)):
            raise _Unmatched("the scale of a norm is not a constant vector")
        epsilon = node.attributes.get_float("epsilon", 1e-5)
        node = _producer(x)
    bias = None
    if node.op_type == "Add" and not node.domain:
        product, bias = node.inputs
        if not values.is_vector(bias, values.size(product, -1)):
            raise _Unmatched("a bias is not a constant vector")
        node = _producer(product)
    if node.op_type != "MatMul" or node.domain:
        raise _Unmatched(f"{node.op_type} computes its heads")
    x, weight = node.inputs
    if x is None or weight is None or values.rank(x) != 3 or not values.is_constant(weight) or values.rank(weight) != 2:
        raise _Unmatched("its heads are not a product of [B,S,C] and a constant matrix")
    return Projection(x, weight, bias, gamma, epsilon)


def _heads(value: ir.Value | None, count: int) -> Heads:
    node, rotation = _producer(value), None
    if node.op_type == "RotaryEmbedding" and node.domain == DOMAIN:
        x, position, cos, sin = node.inputs
        if values.ints(position) != [0] or node.attributes["num_heads"].as_int() != count:
            raise _Unmatched("its rotation begins at another token, or has another number of heads")
        assert cos is not None
        assert sin is not None
        tokens, rows = values.dims(x), values.dims(cos)
        if tokens is None or rows is None or tokens[1] != rows[0]:
            raise _Unmatched("the tables of its rotation may have more rows than there are tokens")
        rotation = Rotation(cos, sin, node.attributes.get_int("interleaved", 0) or 0)
        value, node = x, _producer(x)
    if node.op_type == "Concat" and not node.domain:
        if node.attributes["axis"].as_int() != 1 or len(node.inputs) != 2:
            raise _Unmatched("its heads are not the tokens of two streams")
        return Heads(tuple(_projection(part) for part in node.inputs), rotation)
    return Heads((_projection(value),), rotation)


def _match(node: ir.Node) -> tuple[Heads, Heads, Heads]:
    """Return query, key and value of an attention. Raises _Unmatched."""
    if len(node.inputs) != 3 or any(value is None for value in node.inputs):
        raise _Unmatched("it has a mask, or is packed already")
    count = node.attributes["num_heads"].as_int()
    if node.attributes.get_int("kv_num_heads", count) != count:
        raise _Unmatched("its keys have fewer heads than its queries")
    heads = tuple(_heads(value, count) for value in node.inputs)
    query, key, value = heads
    if len({len(each.streams) for each in heads}) > 1:
        raise _Unmatched("query, key and value have different streams")
    if query.rotation != key.rotation or value.rotation is not None:
        raise _Unmatched("query and key are turned by different angles, or value is turned")
    for q, k, v in zip(query.streams, key.streams, value.streams, strict=True):
        if not q.x is k.x is v.x:
            raise _Unmatched("query, key and value are projected from different inputs")
        if len({values.size(each.weight, 1) for each in (q, k, v)} | {values.size(query.streams[0].weight, 1)}) > 1:
            raise _Unmatched("query, key and value differ in width")
        if len({each.bias is None for each in (q, k, v)}) > 1:
            raise _Unmatched("only some of the projections have a bias")
        if (q.gamma is None) != (k.gamma is None) or v.gamma is not None:
            raise _Unmatched("not query and key alone are normalized")
    if len({each.epsilon for part in (query, key) for each in part.streams if each.epsilon is not None}) > 1:
        raise _Unmatched("its norms have different epsilons")
    width = values.size(query.streams[0].weight, 1) or 0
    if width % (2 * count):
        raise _Unmatched("its heads have an odd or unknown size")
    if len(query.streams) == 1 and query.rotation is None and query.streams[0].gamma is None:
        raise _Unmatched("its heads are neither normalized, rotated nor joined")
    return query, key, value


def _reject_reason(node: ir.Node) -> str | None:
    try:
        _match(node)
    except _Unmatched as reason:
        return str(reason)
    return None


def _packed(graph: ir.Graph, node: ir.Node, name: str, parts: tuple[Projection, ...], count: int) -> ir.Value:
    """Insert the product of one stream before the attention `node`; return it as [B,S,N,3,D]."""
    first = parts[0]
    rows, width = values.size(first.weight, 0) or 0, values.size(first.weight, 1) or 0
    shape, dtype = list(first.x.shape or [])[:2], first.x.type
    weight = new_derived_initializer(
        graph, f"{name}_weight", [part.weight for part in parts], [rows, 3 * width], "interleave", count
    )
    nodes = [ir.node("MatMul", [first.x, weight])]
    if first.bias is not None:
        biases = [part.bias for part in parts if part.bias is not None]
        bias = new_derived_initializer(graph, f"{name}_bias", biases, [3 * width], "interleave", count)
        nodes.append(ir.node("Add", [nodes[0].outputs[0], bias]))
    split = new_initializer(graph, f"{name}_shape", [0, 0, count, 3, width // count])
    nodes.append(ir.node("Reshape", [nodes[-1].outputs[0], split]))
    for new, suffix in zip(nodes, ("_product", "_biased", ""), strict=False):
        output = new.outputs[0]
        output.name, output.type, output.shape = f"{name}{suffix}", dtype, ir.Shape([*shape, 3 * width])
        new.metadata_props.update(node.metadata_props)
    nodes[-1].outputs[0].name = name
    nodes[-1].outputs[0].shape = ir.Shape([*shape, count, 3, width // count])
    graph.insert_before(node, nodes)
    return nodes[-1].outputs[0]


def _rewrite(graph: ir.Graph, node: ir.Node) -> None:
    query, key, value = _match(node)
    count, name = node.attributes["num_heads"].as_int(), node.outputs[0].name
    streams = list(zip(query.streams, key.streams, value.streams, strict=True))
    names = (f"{name}.qkv", f"{name}.other_qkv")
    packed = [_packed(graph, node, names[i], parts, count) for i, parts in enumerate(streams)]
    scales = [scale for q, k, _ in streams for scale in (q.gamma, k.gamma)]
    inputs: list[ir.Value | None] = [packed[0], packed[1] if len(packed) == 2 else None, *scales]
    inputs += [None] * (6 - len(inputs))
    if query.rotation is not None:
        inputs += [query.rotation.cos, query.rotation.sin]
    while inputs[-1] is None:
        inputs.pop()
    epsilon = next((each.epsilon for each in query.streams if each.epsilon is not None), 1e-6)
    attributes = {"epsilon": epsilon, "interleaved": query.rotation.interleaved if query.rotation else 0}
    new = ir.node("RotaryQkv", inputs, attributes, domain=DOMAIN)
    new.metadata_props.update(node.metadata_props)
    output, shape = new.outputs[0], list(packed[0].shape or [])
    tokens = values.dims(node.outputs[0])
    output.name, output.type = f"{name}.heads", packed[0].type
    output.shape = ir.Shape([shape[0], tokens[1] if tokens else None, *shape[2:]])
    graph.insert_before(node, new)
    node.replace_input_with(0, output)
    node.resize_inputs(1)


def rotary_qkv(model: ir.Model) -> PassOutcome:
    """Rewrite the attentions of `model` in place."""
    outcome = rewrite_nodes(model, "rotary_qkv", "MultiHeadAttention", _reject_reason, _rewrite)
    if outcome.counts.total():
        clean_up(model)
        annotate_new(model.graph)
    return outcome


# --- Cases ----------------------------------------------------------------------------------------------------------

_LINEAR = "{0}{1}m = MatMul ({2}, w{0}{1})  {0}{1}f = Add ({0}{1}m, b{0}{1})  {0}{1}s = Reshape ({0}{1}f, split)"


def _stream(prefix: str, x: str, norm: bool = True, bias: bool = True) -> str:
    """Return statements that compute the heads {prefix}q, {prefix}k and {prefix}v [B,S,2,4] from x."""
    text = "  ".join(_LINEAR.format(prefix, part, x) for part in "qkv")
    for part in "qkv":
        heads = f"{prefix}{part}s"
        normal = f"RMSNormalization <epsilon = 0.01> ({heads}, g{prefix}{part})"
        text += f"  {prefix}{part} = {normal if norm and part != 'v' else f'Identity ({heads})'}"
        if not bias:
            text = text.replace(f"Add ({prefix}{part}m, b{prefix}{part})", f"Identity ({prefix}{part}m)")
    return text


_JOIN = "  ".join(f"j{part} = Concat <axis = 1> (t{part}, i{part})" for part in "qkv")
_TURN = "  ".join(
    f"f{part} = Reshape ({{0}}{part}, flat)"
    + (
        f"  r{part} = sd_ort.RotaryEmbedding <num_heads = 2, interleaved = 1> (f{part}, zero, {{1}}, sin)"
        if part != "v"
        else "  rv = Identity (fv)"
    )
    for part in "qkv"
)


def _graph(body: str, attention: str = "(rq, rk, rv)", outputs: str = "") -> str:
    return f"""<ir_version: 10, opset_import: ["" : 23, "sd_ort" : 1]>
        g (float[B,S,6] x, float[B,T,5] t, float[B,S,6] z, float[T,2] tcos, float[T,2] tsin, float[S,2] icos,
           float[S,2] isin, float[M,2] mcos, float[M,2] msin) => (float[B,L,8] y {outputs})
        <float[6,8] wiq, float[6,8] wik, float[6,8] wiv, float[8] biq, float[8] bik, float[8] biv,
         float[5,8] wtq, float[5,8] wtk, float[5,8] wtv, float[8] btq, float[8] btk, float[8] btv,
         float[4] giq, float[4] gik, float[4] gtq, float[4] gtk, float[2,4] rows,
         int64[4] split = {{0, 0, 2, 4}}, int64[3] flat = {{0, 0, -1}}, int64[1] zero = {{0}}, int64[1] one = {{1}}> {{
            {body}
            y = sd_ort.MultiHeadAttention <num_heads = 2, scale = 0.5, unidirectional = 0> {attention}
        }}"""


def _grouped(body: str) -> str:
    """Return a graph of one stream whose two heads of queries share a head of keys and values."""
    for part in "kv":
        body = body.replace(f"(i{part}f, split)", f"(i{part}f, single)")
    body = body.replace("rk = sd_ort.RotaryEmbedding <num_heads = 2", "rk = sd_ort.RotaryEmbedding <num_heads = 1")
    text = _graph(body).replace(
        "MultiHeadAttention <num_heads = 2", "MultiHeadAttention <num_heads = 2, kv_num_heads = 1"
    )
    for part in "kv":
        text = text.replace(f"float[6,8] wi{part}", f"float[6,4] wi{part}").replace(
            f"float[8] bi{part}", f"float[4] bi{part}"
        )
    return text.replace("int64[3] flat", "int64[4] single = {0, 0, 1, 4}, int64[3] flat")


_ONE = {"RotaryQkv": 1, "RMSNormalization": 0, "RotaryEmbedding": 0, "Concat": 0, "MatMul": 1}
_TWO = {**_ONE, "Concat": 2, "MatMul": 2}  # Concat of the tables
_sizes = {"B": 2, "S": 5, "T": 3, "M": 6}
_joint = partial(PassCase, sizes={**_sizes, "L": 8})
_single = partial(PassCase, sizes={**_sizes, "L": 5})
_rejected = partial(_joint, rewrites=0, ops={"RotaryQkv": 0})
_TABLES = "  ".join(f"{name} = Concat <axis = 0> (t{name}, i{name})" for name in ("cos", "sin"))
_FLUX = f"{_TABLES}  {_stream('t', 't')}  {_stream('i', 'x')}  {_JOIN}  {_TURN.format('j', 'cos')}"
_SD3 = f"{_stream('t', 't')}  {_stream('i', 'x')}  {_JOIN}" + "  ".join(
    f"  r{part} = Reshape (j{part}, flat)" for part in "qkv"
)
_ALONE = f"{_stream('i', 'x')}  {_TURN.format('i', 'icos')}".replace("sin", "isin")
CASES = [
    _joint("FLUX, two streams", _graph(_FLUX), ops=_TWO),
    _joint("SD 3, no rotation", _graph(_SD3), ops={**_TWO, "Concat": 0}),
    _joint("text is not normalized", _graph(_FLUX.replace(_stream("t", "t"), _stream("t", "t", norm=False))), ops=_TWO),
    _joint(
        "no bias",
        _graph(
            _FLUX.replace(_stream("t", "t"), _stream("t", "t", bias=False)).replace(
                _stream("i", "x"), _stream("i", "x", bias=False)
            )
        ),
        ops={**_TWO, "Add": 0},
    ),
    _single("FLUX, one stream", _graph(_ALONE), ops=_ONE),
    _single(
        "norms alone",
        _graph(f"{_stream('i', 'x')}  " + "  ".join(f"r{p} = Reshape (i{p}, flat)" for p in "qkv")),
        ops=_ONE,
    ),
    _single(
        "plain self-attention",
        _graph(f"{_stream('i', 'x', norm=False)}  " + "  ".join(f"r{p} = Reshape (i{p}, flat)" for p in "qkv")),
        rewrites=0,
        rejection="neither normalized, rotated nor joined",
    ),
    _single("grouped queries", _grouped(_ALONE), rewrites=0, ops={"RotaryQkv": 0}, rejection="fewer heads"),
    _rejected("key of another input", _graph(_FLUX.replace("(x, wik)", "(z, wik)")), rejection="different inputs"),
    _rejected(
        "another epsilon",
        _graph(_FLUX.replace("ik = RMSNormalization <epsilon = 0.01>", "ik = RMSNormalization <epsilon = 0.02>")),
        rejection="different epsilons",
    ),
    _rejected(
        "query alone is normalized",
        _graph(_FLUX.replace("ik = RMSNormalization <epsilon = 0.01> (iks, gik)", "ik = Identity (iks)")),
        rejection="not query and key alone",
    ),
    _rejected("one bias is missing", _graph(_FLUX.replace("Add (ivm, biv)", "Identity (ivm)")), rejection="only some"),
    _rejected(
        "other angles", _graph(_FLUX.replace("(fk, zero, cos, sin)", "(fk, zero, sin, cos)")), rejection="angles"
    ),
    _rejected("another order", _graph(_FLUX.replace("(tk, ik)", "(ik, tk)")), rejection="different inputs"),
    _rejected("a norm is read twice", _graph(_FLUX, outputs=", float[B,S,2,4] iq"), rejection="other consumers"),
    _rejected(
        "values are normalized",
        _graph(_FLUX.replace("iv = Identity (ivs)", "iv = RMSNormalization (ivs, giq)")),
        rejection="not query and key alone",
    ),
    _rejected(
        "norm of two axes",
        _graph(_FLUX.replace("0.01> (iqs, giq)", "0.01, axis = 2> (iqs, rows)")),
        rejection="several axes",
    ),
    _rejected("something between", _graph(_FLUX.replace("iv = Identity", "iv = Tanh")), rejection="Tanh computes"),
    PassCase(
        "a rotation from the second token",
        _graph(_ALONE.replace("zero", "one").replace("icos", "mcos").replace("isin", "msin")),
        0,
        {"RotaryQkv": 0},
        "another token",
        {**_sizes, "L": 5},
    ),
]

PASS = Pass("rotary_qkv", rotary_qkv, CASES)
