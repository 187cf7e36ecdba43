"""Biases of convolutions and linear layers moved into the operator that reads the result, where adding costs nothing.

    NhwcConv(x, w, b) -> SkipGroupNorm(., gamma, beta, skip)  =>  NhwcConv(x, w) -> SkipGroupNorm(..., skip, b)
    NhwcConv(x, w, b) -> GroupNorm(., gamma, beta)            =>  NhwcConv(x, w) -> SkipGroupNorm(..., zeros, b)
    NhwcConv(x, w, b) -> GroupNorm, and others                =>  the same; the others add b themselves, if all of them
                                                                  can, or read SkipGroupNorm's sum
    NhwcConv(x, w, b) -> Add(., y)                            =>  NhwcConv(x, w) -> BiasAdd(., b, y)
    Add(MatMul(x, w), b) -> Reshape to NHWC -> any of these   =>  MatMul(x, w) -> Reshape -> the same

GPU libraries add a convolution's bias in a kernel of its own (cuDNN's fused ones were slower than both together), and a
MatMul has none, so each costs a launch, a read and a write of the whole feature map. The last form is the linear
projection that ends the transformers of SDXL and SD 2.1. Two results that meet in one SkipGroupNorm or Add (a residual
block's last convolution and its shortcut) hand over the sum of their biases, computed while the model is saved. A
convolution of one pixel adds b as w b, to its own bias: so the image before the widest shortcut of a VAE decoder is
held once, not with its sum beside it. Left alone: a result that several read and no GroupNorm, or of which the Add
broadcasts. Runs after `nhwc_layout`.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir

from fusion_passes import checks as c
from fusion_passes.lower import nhwc_layout
from fusion_passes.operators.record import DOMAIN
from fusion_passes.pass_ import Case, Outcome, Pass, Refusal
from fusion_passes.rewriting import constant, derived, take_place, unique

# (batch size, channels, dtype) -> zeros of which a SkipGroupNorm takes one per sample and channel as its skip.
Zeros = dict[tuple[str, int, ir.DataType | None], ir.Value]


def fold_bias(model: ir.Model) -> Outcome:
    """Move biases of NhwcConv nodes, and those behind MatMul, on in place; counts them."""
    outcome = Outcome(Counter(fold_bias=0))
    zeros: Zeros = {}
    for node in list(model.graph):
        if node.op_type == "NhwcConv" and len(node.inputs) > 2 and node.inputs[2] is not None:
            reason = _move(model.graph, node.outputs[0], node.inputs[2], zeros)
            if reason is None:
                node.resize_inputs(2)
        elif (found := _linear(node)) is not None:
            product, bias, seen = found
            reason = "no Reshape to an image alone reads the sum"
            if seen is not None:
                reason = _move(model.graph, seen, bias, zeros)
            if reason is None:
                node.outputs[0].replace_all_uses_with(product)
                model.graph.remove(node, safe=True)
        else:
            continue
        if reason is None:
            outcome.counts["fold_bias"] += 1
        else:
            outcome.refused.append(Refusal(node, reason))
    if outcome.counts["fold_bias"]:
        model.graph.sort()  # what reads a norm's sum may have come before the norm
    return outcome


def _linear(add: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value | None] | None:
    """(product, bias, the result of the Reshape that alone reads the sum and keeps the channels) of MatMul + bias."""
    if add.op_type != "Add" or add.domain != "":
        return None
    for product, bias in (add.inputs, add.inputs[::-1]):
        made = None if product is None else product.producer()
        if made is not None and made.op_type == "MatMul" and c.is_vector(bias, c.size(product, -1)):
            assert product is not None
            assert bias is not None
            return product, bias, _reshaped(add.outputs[0], c.size(product, -1))
    return None


def _reshaped(value: ir.Value, channels: int | None) -> ir.Value | None:
    users = list(value.uses())
    if len(users) != 1 or value.is_graph_output() or users[0][0].op_type != "Reshape":
        return None
    result = users[0][0].outputs[0]
    return result if c.size(result, -1) == channels else None


def _move(graph: ir.Graph, output: ir.Value, bias: ir.Value, zeros: Zeros) -> str | None:
    """Make `bias` of `output`'s last axis part of what reads `output`; why that cannot be done, or None."""
    users = list(output.uses())
    if output.is_graph_output():
        return "the result is an output of the graph"
    if not c.is_vector(bias, c.size(output, -1)):
        return "the bias is not a constant vector over the channels"
    for reader, index in users:
        if reader.op_type == "GroupNorm" and index == 0:
            _to_skip_group_norm(graph, reader, bias, zeros)
            return None
    if len(users) != 1:
        return "several read the result, and none is a GroupNorm"
    reader, index = users[0]
    if reader.op_type == "SkipGroupNorm" and index in (0, 3) and c.same_shape(output, reader.inputs[0]):
        _give(graph, reader, 4, bias)
    elif reader.op_type == "BiasAdd" and index in (0, 2):
        _give(graph, reader, 1, bias)
    elif reader.op_type == "Add" and all(c.same_shape(output, value) for value in reader.inputs):
        _to_bias_add(graph, reader, index, bias)
    elif reader.op_type in ("SkipGroupNorm", "Add"):
        return f"the {reader.op_type} that reads the result broadcasts"
    else:
        return f"{reader.op_type} reads the result, which adds no bias"
    return None


def _give(graph: ir.Graph, reader: ir.Node, index: int, bias: ir.Value) -> None:
    """Make `bias`, plus the one that is there, the reader's input `index`."""
    there = reader.inputs[index] if len(reader.inputs) > index else None
    if there is not None:
        width = c.size(bias, 0)
        assert width is not None
        bias = derived(graph, f"{reader.outputs[0].name}.bias", [there, bias], [width], "add")
    if len(reader.inputs) <= index:
        reader.resize_inputs(index + 1)
    reader.replace_input_with(index, bias)


def _to_skip_group_norm(graph: ir.Graph, norm: ir.Node, bias: ir.Value, zeros: Zeros) -> None:
    """GroupNorm(x, ...) => SkipGroupNorm(x, ..., zeros, bias), the skip (N, 1, 1, C) without effect.

    What else reads x then adds the biases itself, or reads the sum of x and the biases where one of them cannot.
    """
    x, gamma, beta = norm.inputs[:3]
    old, width = norm.outputs[0], c.size(bias, 0)
    assert x is not None
    assert width is not None
    others = [(reader, index) for reader, index in x.uses() if reader is not norm]  # may come before the norm
    attributes = dict(norm.attributes)
    skip = _zero_skip(graph, x, width, zeros)
    new = ir.node("SkipGroupNorm", [x, gamma, beta, skip, bias], attributes, domain=DOMAIN, num_outputs=2)
    new.metadata_props.update(norm.metadata_props)
    made, total = new.outputs
    made.name, made.type, made.shape = old.name, old.type, old.shape
    total.name, total.type, total.shape = f"{old.name}.bias_sum", old.type, old.shape
    graph.insert_before(norm, new)
    hand_on = all(_adds(reader, index, x) for reader, index in others)
    for reader, index in others:
        if hand_on:
            _hand_on(graph, reader, index, bias)
        else:
            reader.replace_input_with(index, total)
    ir.convenience.replace_all_uses_with(old, made, replace_graph_outputs=True)
    graph.remove(norm, safe=True)


def _zero_skip(graph: ir.Graph, x: ir.Value, width: int, zeros: Zeros) -> ir.Value:
    """Return zeros (N, 1, 1, C) for the batch size N of x: those in `zeros` of the same sizes if there are any.

    Only those made for the result of an NhwcConv are shared. The convolutions are visited in graph order, so they do
    not depend on the norms that read them later.
    """
    batch = None if x.shape is None else x.shape[0]
    key = (str(batch), width, x.dtype)
    is_shared = isinstance(batch, int) or (batch is not None and batch.value is not None)
    if is_shared and key in zeros:
        return zeros[key]
    name, dtype = unique(x, "zero_skip"), x.dtype or ir.DataType.FLOAT
    size = ir.node("Shape", [x], {"start": 0, "end": 1})
    shape = ir.node("Concat", [size.outputs[0], constant(graph, f"{name}_width", [1, 1, width])], {"axis": 0})
    row = constant(graph, f"{name}_row", np.zeros((1, 1, 1, width), dtype.numpy()))
    skip = ir.node("Expand", [row, shape.outputs[0]])
    for node, suffix in ((size, "_batch"), (shape, "_shape"), (skip, "")):
        node.outputs[0].name = f"{name}{suffix}"
    for node, count in ((size, 1), (shape, 4)):
        node.outputs[0].type, node.outputs[0].shape = ir.TensorType(ir.DataType.INT64), ir.Shape([count])
    skip.outputs[0].type, skip.outputs[0].shape = x.type, ir.Shape([batch, 1, 1, width])
    producer = x.producer()
    assert producer is not None
    graph.insert_after(producer, [size, shape, skip])
    if is_shared and producer.op_type == "NhwcConv":
        zeros[key] = skip.outputs[0]
    return skip.outputs[0]


def _adds(reader: ir.Node, index: int, x: ir.Value) -> bool:
    """Whether what reads x as its input `index` can add a bias of x's last axis in place of x."""
    if reader.op_type == "SkipGroupNorm":
        return index in (0, 3) and c.same_shape(x, reader.inputs[0])
    if reader.op_type in ("BiasAdd", "Add"):
        whole = [value for value in reader.inputs if reader.op_type == "Add" or c.rank(value) != 1]
        return all(value is x or c.same_shape(x, value) for value in whole) and whole.count(x) == 1
    return reader.op_type == "NhwcConv" and index == 0 and _is_one_pixel(reader)


def _is_one_pixel(conv: ir.Node) -> bool:
    sizes = c.dims(conv.inputs[1])
    padded = any(conv.attributes.get_ints("pads") or ())
    alone = conv.attributes.get_int("group", 1) == 1
    return c.is_constant(conv.inputs[1]) and sizes is not None and sizes[1:3] == [1, 1] and alone and not padded


def _hand_on(graph: ir.Graph, reader: ir.Node, index: int, bias: ir.Value) -> None:
    """Have what reads x as its input `index` read x + bias instead, as `_adds` says it can."""
    if reader.op_type == "SkipGroupNorm":
        _give(graph, reader, 4, bias)
    elif reader.op_type == "BiasAdd":
        _give(graph, reader, 1, bias)
    elif reader.op_type == "Add":
        _to_bias_add(graph, reader, index, bias)
    else:
        filters, width = reader.inputs[1], c.size(reader.inputs[1], 0)
        assert filters is not None
        assert width is not None
        name = unique(reader.outputs[0], "through")
        _give(graph, reader, 2, derived(graph, name, [filters, bias], [width], "through"))


def _to_bias_add(graph: ir.Graph, add: ir.Node, index: int, bias: ir.Value) -> None:
    """Add(x, y) => BiasAdd(x, bias, y), under the old output's name."""
    node = ir.node("BiasAdd", [add.inputs[index], bias, add.inputs[1 - index]], domain=DOMAIN)
    node.metadata_props.update(add.metadata_props)
    take_place(graph, add, node, add.outputs[0])
    graph.remove(add, safe=True)


def _case(name: str, body: str, fires: int = 1, refused: str | None = None, **ops: int) -> Case:
    """Images x, y [N,8,H,W] -> z, between Transposes; `fires`: the biases that move."""
    graph = f"""<ir_version: 10, opset_import: ["" : 21]>
        f (float[N,H,W,8] xt, float[N,H,W,8] yt) => (float[N,8,H,W] z)
        <float[8,8,3,3] k, float[8,8,1,1] p, float[8] b, float[8] c, float[8] g, float[8] h, float[8,8] q,
         int64[3] rows = {{0, -1, 8}}> {{
            x = Transpose <perm = [0, 3, 1, 2]> (xt)  y = Transpose <perm = [0, 3, 1, 2]> (yt)
            {body}
        }}"""
    return Case(name, graph, fires, ops, refused, {"N": 2, "H": 6, "W": 4})


_CONV = "a = Conv <pads = [1, 1, 1, 1]> (x, k, b)"
_NORM = "GroupNormalization <num_groups = 2>"
_WIDE = "Conv <pads = [1, 1, 1, 1]> (a, k)"
# The end of a transformer with linear projections, on the image as rows of channels.
_ROWS = "i = Transpose <perm = [0, 2, 3, 1]> (x)  r = Reshape (i, rows)  m = MatMul (r, q)  a = Add (b, m)"
_IMAGE = "o = Shape (i)  u = Reshape (a, o)  v = Transpose <perm = [0, 3, 1, 2]> (u)"
_LINEAR = f"{_ROWS}  {_IMAGE}"
_LINEAR_RELU = f"{_ROWS}  d = Relu (a)  {_IMAGE}".replace("Reshape (a,", "Reshape (d,")
CASES = [
    _case("skip", f"{_CONV}  s = Add (a, y)  z = {_NORM} (s, g, h)", SkipGroupNorm=1),
    _case("skip first", f"{_CONV}  s = Add (y, a)  z = {_NORM} (s, g, h)", SkipGroupNorm=1),
    _case("two biases", f"{_CONV}  d = Conv (y, p, c)  s = Add (a, d)  z = {_NORM} (s, g, h)", 2, SkipGroupNorm=1),
    _case("add", f"{_CONV}  z = Add (a, y)", BiasAdd=1, Add=0),
    _case("norm", f"{_CONV}  z = {_NORM} (a, g, h)", GroupNorm=0, SkipGroupNorm=1),
    _case(
        "two norms, one skip",
        f"{_CONV}  n = {_NORM} (a, g, h)  d = Conv (n, p, c)  z = {_NORM} (d, g, h)",
        2,
        GroupNorm=0,
        SkipGroupNorm=2,
        Expand=1,
    ),
    _case("read before the norm too", f"{_CONV}  t = Relu (a)  n = {_NORM} (a, g, h)  z = Add (n, t)", SkipGroupNorm=1),
    _case("read behind it too", f"{_CONV}  n = {_NORM} (a, g, h)  t = Add (n, y)  z = Add (t, a)", BiasAdd=1),
    _case(
        "through a shortcut", f"{_CONV}  n = {_NORM} (a, g, h)  d = Conv (a, p, c)  z = Add (d, n)", 2, BiasAdd=1, Add=0
    ),
    _case("a shortcut without bias", f"{_CONV}  n = {_NORM} (a, g, h)  d = Conv (a, p)  z = Add (d, n)", 2, BiasAdd=1),
    _case("a wide shortcut", f"{_CONV}  n = {_NORM} (a, g, h)  d = {_WIDE}  z = Add (d, n)", BiasAdd=0),
    _case("read twice", f"{_CONV}  s = Relu (a)  t = Sigmoid (a)  z = Add (s, t)", 0, "several read", BiasAdd=0),
    _case("doubled", f"{_CONV}  z = Add (a, a)", 0, "several read", BiasAdd=0),
    _case("something between", f"{_CONV}  s = Relu (a)  z = {_NORM} (s, g, h)", 0, "Relu reads", GroupNorm=1),
    _case("an output", _CONV.replace("a =", "z ="), 0, "adds no bias"),
    _case("linear, add", f"{_LINEAR}  z = Add (v, y)", BiasAdd=1),
    _case("linear, skip", f"{_LINEAR}  s = Add (y, v)  z = {_NORM} (s, g, h)", SkipGroupNorm=1),
    _case("linear, norm", f"{_LINEAR}  z = {_NORM} (v, g, h)", SkipGroupNorm=1, GroupNorm=0),
    _case("linear, something between", f"{_LINEAR_RELU}  z = Add (v, y)", 0, "no Reshape", BiasAdd=0),
    _case("linear, read twice", f"{_LINEAR}  t = ReduceSum <keepdims = 0> (a)  z = Add (v, t)", 0, "no Reshape"),
]

PASS = Pass("fold_bias", fold_bias, CASES, after=(nhwc_layout.PASS,))
