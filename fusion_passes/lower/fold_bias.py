"""Moves biases of convolutions and linear layers into the consumer of the result, which adds them without extra cost.

    NhwcConv(x, w, b) -> SkipGroupNorm(., gamma, beta, skip)  =>  NhwcConv(x, w) -> SkipGroupNorm(..., skip, b)
    NhwcConv(x, w, b) -> GroupNorm(., gamma, beta)            =>  NhwcConv(x, w) -> SkipGroupNorm(..., zeros, b)
    NhwcConv(x, w, b) -> GroupNorm and others                 =>  the same; the others add b themselves if all of them
                                                                  can, else they read SkipGroupNorm's sum
    NhwcConv(x, w, b) -> Add(., y)                            =>  NhwcConv(x, w) -> BiasAdd(., b, y)
    Add(MatMul(x, w), b) -> Reshape to NHWC -> any of these   =>  MatMul(x, w) -> Reshape -> the same

GPU libraries add a convolution's bias in a separate kernel (cuDNN's fused ones were slower than both together), and
MatMul has no bias. Each bias costs a launch and a read and write of the feature map. The last form is the linear
projection at the end of the transformers of SDXL and SD 2.1. Two biases that meet in one SkipGroupNorm or Add (those of
a residual block's last convolution and its shortcut) are added when the model is saved. A 1x1 convolution that reads
the result adds w b to its own bias. The image before the widest shortcut of a VAE decoder is thus stored once, not also
with the bias added. Rejected: several consumers without a GroupNorm, an Add that broadcasts. Runs after `nhwc_layout`.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir

from fusion_passes import DOMAIN
from fusion_passes import value_queries as values
from fusion_passes.graph_edits import new_derived_initializer, new_initializer, replace_nodes, unique_name
from fusion_passes.graph_pass import Pass, PassCase, PassOutcome, Rejection
from fusion_passes.lower import nhwc_layout

# (batch size, channels, dtype) -> zeros (N, 1, 1, C) for the skip of SkipGroupNorm.
ZeroSkips = dict[tuple[str, int, ir.DataType | None], ir.Value]


def fold_bias(model: ir.Model) -> PassOutcome:
    """Move the biases of NhwcConv nodes and those after MatMul in place; count the moved biases."""
    outcome = PassOutcome(Counter(fold_bias=0))
    zero_skips: ZeroSkips = {}
    for node in list(model.graph):
        if node.op_type == "NhwcConv" and len(node.inputs) > 2 and node.inputs[2] is not None:
            reason = _move(model.graph, node.outputs[0], node.inputs[2], zero_skips)
            if reason is None:
                node.resize_inputs(2)
        elif (linear := _match_linear(node)) is not None:
            matmul, bias, image = linear
            reason = "the sum has a consumer other than one Reshape to an image"
            reason = reason if image is None else _move(model.graph, image, bias, zero_skips)
            if reason is None:
                node.outputs[0].replace_all_uses_with(matmul)
                model.graph.remove(node, safe=True)
        else:
            continue
        if reason is None:
            outcome.counts["fold_bias"] += 1
        else:
            outcome.rejections.append(Rejection(node, reason))
    if outcome.counts["fold_bias"]:
        model.graph.sort()  # a consumer of a norm's sum may precede the norm
    return outcome


def _match_linear(add: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value | None] | None:
    """Match MatMul + bias: return (MatMul output, bias, output of the Reshape that is the only consumer), or None.

    The third is None if there is another consumer, or the Reshape changes the last axis.
    """
    if add.op_type != "Add" or add.domain != "":
        return None
    for matmul, bias in (add.inputs, add.inputs[::-1]):
        producer = None if matmul is None else matmul.producer()
        if producer is None or producer.op_type != "MatMul":
            continue
        if values.is_vector(bias, values.size(matmul, -1)):
            assert matmul is not None
            assert bias is not None
            return matmul, bias, _only_reshaped(add.outputs[0], values.size(matmul, -1))
    return None


def _only_reshaped(value: ir.Value, channels: int | None) -> ir.Value | None:
    uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output() or uses[0][0].op_type != "Reshape":
        return None
    result = uses[0][0].outputs[0]
    return result if values.size(result, -1) == channels else None


def _move(graph: ir.Graph, output: ir.Value, bias: ir.Value, zero_skips: ZeroSkips) -> str | None:
    """Move `bias` on the last axis of `output` into the consumers of `output`. Return a reject reason, or None."""
    uses = list(output.uses())
    if output.is_graph_output():
        return "the result is an output of the graph"
    if not values.is_vector(bias, values.size(output, -1)):
        return "the bias is not a constant vector over the channels"
    for consumer, index in uses:
        if consumer.op_type == "GroupNorm" and index == 0:
            _to_skip_group_norm(graph, consumer, bias, zero_skips)
            return None
    if len(uses) != 1:
        return "the result has several consumers, and none is a GroupNorm"
    consumer, index = uses[0]
    if consumer.op_type == "SkipGroupNorm" and index in (0, 3) and values.same_shape(output, consumer.inputs[0]):
        _add_bias_input(graph, consumer, 4, bias)
    elif consumer.op_type == "BiasAdd" and index in (0, 2):
        _add_bias_input(graph, consumer, 1, bias)
    elif consumer.op_type == "Add" and all(values.same_shape(output, value) for value in consumer.inputs):
        _to_bias_add(graph, consumer, index, bias)
    elif consumer.op_type in ("SkipGroupNorm", "Add"):
        return f"the {consumer.op_type} that consumes the result broadcasts"
    else:
        return f"the consumer {consumer.op_type} adds no bias"
    return None


def _add_bias_input(graph: ir.Graph, consumer: ir.Node, index: int, bias: ir.Value) -> None:
    """Add `bias` to the input `index` of `consumer`, which may be missing."""
    present = consumer.inputs[index] if len(consumer.inputs) > index else None
    if present is not None:
        width = values.static_size(bias, 0)
        bias = new_derived_initializer(graph, f"{consumer.outputs[0].name}.bias", [present, bias], [width], "add")
    if len(consumer.inputs) <= index:
        consumer.resize_inputs(index + 1)
    consumer.replace_input_with(index, bias)


def _to_skip_group_norm(graph: ir.Graph, norm: ir.Node, bias: ir.Value, zero_skips: ZeroSkips) -> None:
    """GroupNorm(x, ...) => SkipGroupNorm(x, ..., zeros, bias), with zeros (N, 1, 1, C) as skip.

    Other consumers of x add the bias themselves. If one of them cannot, all of them read SkipGroupNorm's sum.
    """
    x, gamma, beta = norm.inputs[:3]
    old, width = norm.outputs[0], values.static_size(bias, 0)
    assert x is not None
    others = [(consumer, index) for consumer, index in x.uses() if consumer is not norm]  # may precede the norm
    attributes = dict(norm.attributes)
    skip = _zero_skip(graph, x, width, zero_skips)
    new = ir.node("SkipGroupNorm", [x, gamma, beta, skip, bias], attributes, domain=DOMAIN, num_outputs=2)
    new.metadata_props.update(norm.metadata_props)
    normalized, total = new.outputs
    normalized.name, normalized.type, normalized.shape = old.name, old.type, old.shape
    total.name, total.type, total.shape = f"{old.name}.bias_sum", old.type, old.shape
    graph.insert_before(norm, new)
    can_add = all(_can_add_bias(consumer, index, x) for consumer, index in others)
    for consumer, index in others:
        if can_add:
            _add_bias(graph, consumer, index, bias)
        else:
            consumer.replace_input_with(index, total)
    ir.convenience.replace_all_uses_with(old, normalized, replace_graph_outputs=True)
    graph.remove(norm, safe=True)


def _zero_skip(graph: ir.Graph, x: ir.Value, width: int, zero_skips: ZeroSkips) -> ir.Value:
    """Return zeros (N, 1, 1, C) for the batch size N of x, from `zero_skips` if possible.

    Only zeros for the output of an NhwcConv are shared. The convolutions are visited in graph order, so such zeros do
    not depend on norms that use them later.
    """
    batch = None if x.shape is None else x.shape[0]
    key = (str(batch), width, x.dtype)
    is_shared = isinstance(batch, int) or (batch is not None and batch.value is not None)
    if is_shared and key in zero_skips:
        return zero_skips[key]
    name, dtype = unique_name(x, "zero_skip"), x.dtype or ir.DataType.FLOAT
    size = ir.node("Shape", [x], {"start": 0, "end": 1})
    shape = ir.node("Concat", [size.outputs[0], new_initializer(graph, f"{name}_width", [1, 1, width])], {"axis": 0})
    row = new_initializer(graph, f"{name}_row", np.zeros((1, 1, 1, width), dtype.numpy()))
    skip = ir.node("Expand", [row, shape.outputs[0]])
    for node, suffix in ((size, "_batch"), (shape, "_shape"), (skip, "")):
        node.outputs[0].name = f"{name}{suffix}"
    for node, count in ((size, 1), (shape, 4)):
        node.outputs[0].type, node.outputs[0].shape = ir.TensorType(ir.DataType.INT64), ir.Shape([count])
    skip.outputs[0].type, skip.outputs[0].shape = x.type, ir.Shape([batch, 1, 1, width])
    producer = values.producer(x)
    graph.insert_after(producer, [size, shape, skip])
    if is_shared and producer.op_type == "NhwcConv":
        zero_skips[key] = skip.outputs[0]
    return skip.outputs[0]


def _can_add_bias(consumer: ir.Node, index: int, x: ir.Value) -> bool:
    """Return whether a consumer of x as its input `index` can add a bias on x's last axis itself."""
    if consumer.op_type == "SkipGroupNorm":
        return index in (0, 3) and values.same_shape(x, consumer.inputs[0])
    if consumer.op_type in ("BiasAdd", "Add"):
        addends = [value for value in consumer.inputs if consumer.op_type == "Add" or values.rank(value) != 1]
        return all(value is x or values.same_shape(x, value) for value in addends) and addends.count(x) == 1
    return consumer.op_type == "NhwcConv" and index == 0 and _is_conv1x1(consumer)


def _is_conv1x1(conv: ir.Node) -> bool:
    sizes = values.dims(conv.inputs[1])
    padded = any(conv.attributes.get_ints("pads") or ())
    grouped = conv.attributes.get_int("group", 1) != 1
    is_1x1 = sizes is not None and sizes[1:3] == [1, 1]
    return values.is_constant(conv.inputs[1]) and is_1x1 and not grouped and not padded


def _add_bias(graph: ir.Graph, consumer: ir.Node, index: int, bias: ir.Value) -> None:
    """Make a consumer for which `_can_add_bias` is true add `bias` to its input `index`."""
    if consumer.op_type == "SkipGroupNorm":
        _add_bias_input(graph, consumer, 4, bias)
    elif consumer.op_type == "BiasAdd":
        _add_bias_input(graph, consumer, 1, bias)
    elif consumer.op_type == "Add":
        _to_bias_add(graph, consumer, index, bias)
    else:
        filters, width = values.operand(consumer, 1), values.static_size(consumer.inputs[1], 0)
        name = unique_name(consumer.outputs[0], "through")
        product = new_derived_initializer(graph, name, [filters, bias], [width], "conv1x1_bias")
        _add_bias_input(graph, consumer, 2, product)


def _to_bias_add(graph: ir.Graph, add: ir.Node, index: int, bias: ir.Value) -> None:
    """Add(x, y) => BiasAdd(x, bias, y), with the name of the old output."""
    node = ir.node("BiasAdd", [add.inputs[index], bias, add.inputs[1 - index]], domain=DOMAIN)
    replace_nodes(graph, node, add, add)


def _case(name: str, body: str, rewrites: int = 1, rejection: str | None = None, **ops: int) -> PassCase:
    """Images x, y [N,8,H,W] -> z, between Transposes; `rewrites`: the number of moved biases."""
    graph = f"""<ir_version: 10, opset_import: ["" : 21]>
        f (float[N,H,W,8] xt, float[N,H,W,8] yt) => (float[N,8,H,W] z)
        <float[8,8,3,3] k, float[8,8,1,1] p, float[8] b, float[8] c, float[8] g, float[8] h, float[8,8] q,
         int64[3] rows = {{0, -1, 8}}> {{
            x = Transpose <perm = [0, 3, 1, 2]> (xt)  y = Transpose <perm = [0, 3, 1, 2]> (yt)
            {body}
        }}"""
    return PassCase(name, graph, rewrites, ops, rejection, {"N": 2, "H": 6, "W": 4})


_CONV = "a = Conv <pads = [1, 1, 1, 1]> (x, k, b)"
_NORM = "GroupNormalization <num_groups = 2>"
_WIDE = "Conv <pads = [1, 1, 1, 1]> (a, k)"
# The end of a transformer with linear projections, on the image as (N, H*W, C).
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
    _case("read twice", f"{_CONV}  s = Relu (a)  t = Sigmoid (a)  z = Add (s, t)", 0, "several consumers", BiasAdd=0),
    _case("doubled", f"{_CONV}  z = Add (a, a)", 0, "several consumers", BiasAdd=0),
    _case("something between", f"{_CONV}  s = Relu (a)  z = {_NORM} (s, g, h)", 0, "consumer Relu", GroupNorm=1),
    _case("an output", _CONV.replace("a =", "z ="), 0, "adds no bias"),
    _case("linear, add", f"{_LINEAR}  z = Add (v, y)", BiasAdd=1),
    _case("linear, skip", f"{_LINEAR}  s = Add (y, v)  z = {_NORM} (s, g, h)", SkipGroupNorm=1),
    _case("linear, norm", f"{_LINEAR}  z = {_NORM} (v, g, h)", SkipGroupNorm=1, GroupNorm=0),
    _case("linear, something between", f"{_LINEAR_RELU}  z = Add (v, y)", 0, "other than one Reshape", BiasAdd=0),
    _case(
        "linear, read twice",
        f"{_LINEAR}  t = ReduceSum <keepdims = 0> (a)  z = Add (v, t)",
        0,
        "other than one Reshape",
    ),
]

PASS = Pass("fold_bias", fold_bias, CASES, runs_after=(nhwc_layout.PASS,))
