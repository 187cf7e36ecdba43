"""Lowers MatMul and 1x1 convolutions with bias and residual to LinearAdd, for libraries with such epilogues.

    MatMul(x, w) -> BiasAdd(., b, skip)                     =>  LinearAdd(x, w, b, skip)
    NhwcConv 1x1 (x, w, b?)                                 =>  LinearAdd(x, w', b?)
    NhwcConv 1x1 (x, w) -> BiasAdd(., b, skip)              =>  LinearAdd(x, w', b, skip)
    NhwcConv 1x1 (x, w) -> SkipGroupNorm(., g, h, skip, b)  =>  LinearAdd(x, w', b, skip) -> s -> GroupNorm(s, g, h)
    MatMul(x, w) -> Reshape -> BiasAdd(., b, skip)          =>  LinearAdd(Reshape(x), w, b, skip)    of a square w
    MatMul(x, w) -> Add(., b)                               =>  LinearAdd(x, w, b)
    MatMul(x, w)                                            =>  LinearAdd(x, w)
    LinearAdd(x, w, b?) -> Gelu by tanh                     =>  LinearAdd(x, w, b?; gelu)

A 1x1 convolution is a matrix multiplication on NHWC tensors. The purpose of the last rule is tuning: LinearAdd has
candidates, MatMul has not. `SHORTCUTS_FIRST` does not fuse a residual into a shortcut that has fewer output than input
channels and reads a convolution. The shortcut then runs before the block that it bypasses, so the memory of its input,
the widest image of a VAE decoder, is free for the block's first norm. Rejected: weights that are not constant matrices;
grouped, strided or padded convolutions; results with other consumers; GELU of a sum with a residual. Runs after
`nhwc_layout`, `pack_qkv`, `fold_bias`, `linear_split_gelu` and `split_concat`, if they run.

`CPU` leaves products to ONNX Runtime for which its MatMul is faster: of a row an image, and with few columns. ONNX
Runtime packs the weights of a MatMul when a session is opened, LinearAdd at every run. CPU time of LinearAdd by that of
MatMul and Add, onnxruntime 1.31.1, one thread of an AMD EPYC with AVX-512, weights not in the caches:

    rows    K x N, and the ratio
    8192    320 x 320 0.87, 320 x 2560 0.85, 1280 x 320 0.87
    2048    320 x 320 0.99, 640 x 640 0.92, 640 x 5120 0.98, 2560 x 640 1.00, 320 x 16 1.27
     512    640 x 5120 1.05, 1280 x 1280 1.06, 1280 x 10240 1.11, 5120 x 1280 1.09, 128 x 4 1.18
     128    1280 x 1280 1.06, 1280 x 10240 1.14, 5120 x 1280 1.20
     1-8    1280 x 1280 1.45 to 1.68

A step of SD 1.5's UNet, which has 160 of them, takes 1.004 times as long at 32 x 32 latents and 0.980 at 64 x 64. Its
session is opened in half the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import onnx_ir as ir

from fusion_passes import DOMAIN
from fusion_passes import value_queries as values
from fusion_passes.graph_edits import new_derived_initializer, replace_nodes, replace_value
from fusion_passes.graph_pass import Pass, PassCase, PassOutcome, Rejection
from fusion_passes.lower import fold_bias, linear_split_gelu, nhwc_layout, pack_qkv, split_concat

Constraint = Callable[[ir.Node], str | None]  # why the kernel shall not compute a MatMul, or None
MIN_COLUMNS = 64  # of the CPU's kernel: it multiplies by 16 or 32 at once


def _any(node: ir.Node) -> str | None:
    return None


def _slow_on_cpu(node: ir.Node) -> str | None:
    columns = values.size(node.inputs[1], 1)
    if (values.rank(node.inputs[0]) or 0) < 3:
        return "its input has a row an image: MatMul, whose weights are packed before, is faster"
    if columns is None or columns < MIN_COLUMNS:
        return f"it has fewer than {MIN_COLUMNS} columns"
    return None


@dataclass
class _Gemm:
    """A MatMul or 1x1 NhwcConv that multiplies `x` (..., K) by a matrix (K, N), and its bias."""

    node: ir.Node
    x: ir.Value
    bias: ir.Value | None


def linear_add(model: ir.Model, shortcuts_first: bool = False, constraint: Constraint = _any) -> PassOutcome:
    """Rewrite the MatMuls and 1x1 convolutions of `model` that `constraint` allows, in place; count them."""
    outcome = PassOutcome(Counter(linear_add=0))
    for node in list(model.graph):
        if node.op_type == "Add" and node.domain == "":
            outcome.counts["linear_add"] += _fuse_add(model.graph, node, constraint)
            continue
        if node.domain != DOMAIN or node.op_type not in ("BiasAdd", "SkipGroupNorm"):
            continue
        if shortcuts_first and node.op_type == "SkipGroupNorm" and _narrows(node):
            continue
        if (_fuse_bias_add if node.op_type == "BiasAdd" else _fuse_skip_group_norm)(model.graph, node, constraint):
            outcome.counts["linear_add"] += 1
        else:
            message = "none of its addends is a MatMul or 1x1 convolution of the same shape without other consumers"
            outcome.rejections.append(Rejection(node, message))
    for node in list(model.graph):
        if node.op_type not in ("MatMul", "NhwcConv"):
            continue
        gemm = _match_gemm(node, constraint)
        if gemm is not None:
            _insert_linear_add(model.graph, node, gemm, node.outputs[0], gemm.bias, None)
            model.graph.remove(node, safe=True)
            outcome.counts["linear_add"] += 1
        elif reason := _reject_reason(node, constraint):
            outcome.rejections.append(Rejection(node, reason))
    for node in list(model.graph):
        if node.op_type == "Gelu" and node.attributes.get_string("approximate", "none") == "tanh":
            outcome.counts["linear_gelu"] += _fuse_gelu(model.graph, node)
    return outcome


def _reject_reason(node: ir.Node, constraint: Constraint) -> str | None:
    """Return why a MatMul or NhwcConv is not a multiplication by a constant matrix, or None if it is."""
    x, weight = node.inputs[:2]
    if x is None or (values.rank(x) or 0) < 2:
        return "its input is not a matrix, or of unknown rank"
    if not values.is_constant(weight):
        return "its weight is not constant"
    if node.op_type == "MatMul":
        return constraint(node) if values.rank(weight) == 2 else "its weight is not a matrix"
    return None if _is_conv1x1(node) else "it is not a 1x1 convolution without groups, strides and pads"


def _match_gemm(node: ir.Node | None, constraint: Constraint) -> _Gemm | None:
    if node is None or node.op_type not in ("MatMul", "NhwcConv") or _reject_reason(node, constraint) is not None:
        return None
    x = values.operand(node, 0)
    has_bias = node.op_type == "NhwcConv" and len(node.inputs) > 2
    return _Gemm(node, x, node.inputs[2] if has_bias else None)


def _is_conv1x1(conv: ir.Node) -> bool:
    attributes = conv.attributes
    default = attributes.get_int("group", 1) == 1 and attributes.get_string("auto_pad", "NOTSET") == "NOTSET"
    strides, pads = attributes.get_ints("strides", [1, 1]), attributes.get_ints("pads", [0, 0, 0, 0])
    size = [values.size(conv.inputs[1], axis) for axis in (1, 2)]
    return default and size == [1, 1] and not any(pads or ()) and all(stride == 1 for stride in strides or ())


def _single_use_gemm(value: ir.Value | None, constraint: Constraint) -> _Gemm | None:
    """Return the GEMM without bias that computes `value`, if `value` has one consumer, else None."""
    if value is None or len(list(value.uses())) != 1 or value.is_graph_output():
        return None
    gemm = _match_gemm(value.producer(), constraint)
    return gemm if gemm is not None and gemm.bias is None else None


def _fuse_bias_add(graph: ir.Graph, node: ir.Node, constraint: Constraint) -> bool:
    x, bias, skip = node.inputs
    for value, other in ((x, skip), (skip, x)):
        if not values.same_shape(value, other):
            continue
        gemm, reshape = _single_use_gemm(value, constraint), None
        if gemm is None and (reshape := _reshape_of_square_gemm(value, constraint)) is not None:
            gemm = _single_use_gemm(reshape.inputs[0], constraint)
            assert gemm is not None
            gemm = replace(gemm, x=_reshaped_input(graph, node, reshape, gemm.x))
        if gemm is None:
            continue
        _insert_linear_add(graph, node, gemm, node.outputs[0], bias, other)
        for old in (node, reshape, gemm.node):
            if old is not None:
                graph.remove(old, safe=True)
        return True
    return False


def _reshape_of_square_gemm(value: ir.Value | None, constraint: Constraint) -> ir.Node | None:
    """Return the Reshape that computes `value` from x times a square matrix, if each has one consumer, else None.

    The Reshape must preserve the last axis. It can then be applied to x, which has the shape of the product.
    """
    if value is None or len(list(value.uses())) != 1 or value.is_graph_output():
        return None
    node = value.producer()
    gemm = _single_use_gemm(node.inputs[0], constraint) if node is not None and node.op_type == "Reshape" else None
    if node is None or gemm is None or gemm.node.op_type != "MatMul":
        return None
    width = values.size(gemm.x, -1)
    return node if width is not None and width == values.size(node.inputs[0], -1) == values.size(value, -1) else None


def _reshaped_input(graph: ir.Graph, before: ir.Node, reshape: ir.Node, x: ir.Value) -> ir.Value:
    """Apply a copy of `reshape` to x, which has the shape of its input, before the node `before`."""
    old = reshape.outputs[0]
    new = ir.node("Reshape", [x, reshape.inputs[1]], {k: a.value for k, a in reshape.attributes.items()})
    result = new.outputs[0]
    result.name, result.type, result.shape = f"{old.name}.rows", old.type, old.shape
    graph.insert_before(before, new)
    return result


def _fuse_add(graph: ir.Graph, node: ir.Node, constraint: Constraint) -> bool:
    for value, bias in (node.inputs, node.inputs[::-1]):
        gemm = _single_use_gemm(value, constraint)
        if gemm is not None and gemm.node.op_type == "MatMul" and values.is_vector(bias, values.size(value, -1)):
            _insert_linear_add(graph, node, gemm, node.outputs[0], bias, None)
            graph.remove(node, safe=True)
            graph.remove(gemm.node, safe=True)
            return True
    return False


def _fuse_gelu(graph: ir.Graph, node: ir.Node) -> bool:
    x = node.inputs[0]
    linear = None if x is None else x.producer()
    if x is None or linear is None or linear.op_type != "LinearAdd" or len(linear.inputs) > 3:
        return False
    if len(list(x.uses())) != 1 or x.is_graph_output():
        return False
    new = ir.node("LinearAdd", linear.inputs, {"gelu": 1}, domain=DOMAIN)
    replace_nodes(graph, new, linear, node, linear)
    return True


def _narrows(norm: ir.Node) -> bool:
    """Return whether a SkipGroupNorm adds a GEMM of a convolution's result with fewer output than input channels."""
    for gemm in (_single_use_gemm(norm.inputs[0], _any), _single_use_gemm(norm.inputs[3], _any)):
        producer = None if gemm is None else gemm.x.producer()
        if gemm is None or producer is None or producer.op_type != "NhwcConv":
            continue
        inputs, outputs = values.size(gemm.x, -1), values.size(gemm.node.outputs[0], -1)
        if inputs is not None and outputs is not None and outputs < inputs:
            return True
    return False


def _fuse_skip_group_norm(graph: ir.Graph, node: ir.Node, constraint: Constraint) -> bool:
    x, gamma, beta, skip = node.inputs[:4]
    bias = node.inputs[4] if len(node.inputs) > 4 else None
    for value, other in ((x, skip), (skip, x)):
        gemm = _single_use_gemm(value, constraint)
        if gemm is None or not values.same_shape(value, other):
            continue
        summed = _insert_linear_add(graph, node, gemm, node.outputs[1], bias, other)
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        norm = ir.node("GroupNorm", [summed, gamma, beta], attributes, domain=DOMAIN)
        replace_nodes(graph, norm, node, node, gemm.node)
        return True
    return False


def _insert_linear_add(
    graph: ir.Graph, before: ir.Node, gemm: _Gemm, output: ir.Value, bias: ir.Value | None, skip: ir.Value | None
) -> ir.Value:
    """Insert a LinearAdd before the node `before`, replace `output` by its output, and return that."""
    inputs: list[ir.Value | None] = [gemm.x, _weight_matrix(graph, gemm.node), bias, skip]
    while inputs[-1] is None:
        inputs.pop()
    new = ir.node("LinearAdd", inputs, domain=DOMAIN)
    new.metadata_props.update(gemm.node.metadata_props)
    replace_value(graph, before, new, output)
    return new.outputs[0]


def _weight_matrix(graph: ir.Graph, node: ir.Node) -> ir.Value:
    """Return the weight as (K, N)."""
    weight = values.operand(node, 1)
    if node.op_type == "MatMul":
        return weight
    filters, channels = values.static_size(weight, 0), values.static_size(weight, 3)
    name = f"{node.outputs[0].name}.matrix"
    return new_derived_initializer(graph, name, [weight], [channels, filters], "matrix", filters)


def _case(name: str, body: str, rewrites: int = 1, rejection: str | None = None, **ops: int) -> PassCase:
    graph = f"""<ir_version: 10, opset_import: ["" : 21]>
        f (float[N,H,W,8] xt, float[N,H,W,8] yt, float[N,8,W,H] t) => (float[N,8,P,Q] z)
        <float[8,8,3,3] k, float[8,8,1,1] p, float[8,1,1,1] q, float[8] b, float[8] c, float[8] g, float[8] h,
         float[8,8] w, float[16,8] v, float[16,8,3,3] k1, float[8,16,3,3] k2, float[8,16,1,1] k3,
         int64[3] rows = {{0, -1, 8}}, int64[3] wide = {{0, -1, 16}}> {{
            x = Transpose <perm = [0, 3, 1, 2]> (xt)  y = Transpose <perm = [0, 3, 1, 2]> (yt)
            {body}
        }}"""
    return PassCase(name, graph, rewrites, {"LinearAdd": rewrites} | ops, rejection, {"N": 2, "H": 4, "W": 4})


_CONV = "a = Conv <pads = [1, 1, 1, 1]> (x, k, b)"
_NORM = "GroupNormalization <num_groups = 2>"
# A linear layer on the image as (N, H*W, C), and back.
_FIRST = "i = Transpose <perm = [0, 2, 3, 1]> (x)"
_ROWS = f"{_FIRST}  r = Reshape (i, rows)  m = MatMul (r, w)"
_WIDE = f"{_FIRST}  d = Concat <axis = 3> (i, i)  r = Reshape (d, wide)  m = MatMul (r, v)"
_IMAGE = "o = Shape (i)  u = Reshape (a, o)  z = Transpose <perm = [0, 3, 1, 2]> (u)"
_TANH = 'Gelu <approximate = "tanh">'
_ADDED = f"{_IMAGE.replace('z =', 'e =')}  z = Add (e, y)"
CASES = [
    _case("1x1", "z = Conv (x, p, b)", NhwcConv=0),
    _case("residual", "a = Conv (x, p, b)  z = Add (a, y)", BiasAdd=0, Add=0),
    _case("shortcut", f"{_CONV}  d = Conv (y, p, c)  z = Add (a, d)", NhwcConv=1, BiasAdd=0),
    _case("norm", f"a = Conv (x, p, b)  s = Add (a, y)  z = {_NORM} (s, g, h)", GroupNorm=1, SkipGroupNorm=0),
    _case("sum read too", f"a = Conv (x, p, b)  s = Add (a, y)  n = {_NORM} (s, g, h)  z = Add (s, n)", GroupNorm=1),
    _case("bias", f"{_ROWS}  a = Add (b, m)  {_IMAGE}", Add=0, MatMul=0),
    _case("GELU by tanh", f"{_ROWS}  d = Add (m, b)  a = {_TANH} (d)  {_IMAGE}", 2, Gelu=0, LinearAdd=1),
    _case("exact GELU", f"{_ROWS}  d = Add (m, b)  a = Gelu (d)  {_IMAGE}", Gelu=1),
    _case("GELU of a product read twice", f"{_ROWS}  d = {_TANH} (m)  a = Add (d, m)  {_IMAGE}", Gelu=1),
    _case("product read twice", f"{_ROWS}  a = Add (m, b)  d = Mul (a, m)  {_IMAGE.replace('(a', '(d')}", Add=1),
    _case("rows", f"{_ROWS}  a = Add (m, b)  {_ADDED}", Add=0, BiasAdd=0),
    _case("rows of another width", f"{_WIDE}  a = Add (m, b)  {_ADDED}", BiasAdd=1),
    _case("two images", "z = MatMul (x, t)", 0, "not constant", MatMul=1),
    _case("3x3", _CONV.replace("a =", "z ="), 0, "not a 1x1 convolution", NhwcConv=1),
    _case("strided", "z = Conv <strides = [2, 2]> (x, p, b)", 0, "not a 1x1 convolution", NhwcConv=1),
    _case("grouped", "z = Conv <group = 8> (x, q, b)", 0, "not a 1x1 convolution", NhwcConv=1),
    _case("sum of others", f"{_CONV}  z = Add (a, y)", 0, "none of its addends", BiasAdd=1),
]

# A block that halves the channels of e, and its shortcut.
_WIDER = "Conv <pads = [1, 1, 1, 1]> (x, k1)"
_BLOCK = "a = Conv <pads = [1, 1, 1, 1]> (e, k2)  d = Conv (e, k3, c)  s = Add (a, d)"
SHORTCUT_CASES = [
    _case("first", f"e = {_WIDER}  {_BLOCK}  z = {_NORM} (s, g, h)", SkipGroupNorm=1, GroupNorm=0),
    _case("of another image", f"i = {_WIDER}  e = Relu (i)  {_BLOCK}  z = {_NORM} (s, g, h)", GroupNorm=1),
    _case("as wide", f"{_CONV}  d = Conv (y, p, c)  s = Add (a, d)  z = {_NORM} (s, g, h)", GroupNorm=1),
    _case("sum of others", f"{_CONV}  z = Add (a, y)", 0, "none of its addends", BiasAdd=1),
]


def _cpu_case(
    name: str, body: str, columns: int, rewrites: int = 0, rejection: str | None = None, **ops: int
) -> PassCase:
    graph = f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,S,8] x, float[N,8] t) => (float[N,R,{columns}] z)
        <float[8,{columns}] w, float[{columns}] b> {{ {body} }}"""
    return PassCase(name, graph, rewrites, {"LinearAdd": rewrites} | ops, rejection, {"N": 2, "S": 5})


CPU_CASES = [
    _cpu_case("rows of tokens", "m = MatMul (x, w)  z = Add (m, b)", 64, 1, MatMul=0, Add=0),
    _cpu_case("few columns", "m = MatMul (x, w)  z = Add (m, b)", 63, 0, "fewer than 64 columns", MatMul=1, Add=1),
    _cpu_case(
        "a row an image",
        "axis = Constant <value_ints = [1]> ()  m = MatMul (t, w)  a = Add (m, b)  z = Unsqueeze (a, axis)",
        64,
        0,
        "a row an image",
        MatMul=1,
        Add=1,
    ),
]

_RUNS_AFTER = (nhwc_layout.PASS, fold_bias.PASS, pack_qkv.PASS, linear_split_gelu.PASS, split_concat.PASS)
PASS = Pass("linear_add", linear_add, CASES, runs_after=_RUNS_AFTER)
SHORTCUTS_FIRST = Pass(
    "linear_add_shortcuts_first", partial(linear_add, shortcuts_first=True), SHORTCUT_CASES, runs_after=_RUNS_AFTER
)
CPU = Pass("linear_add_cpu", partial(linear_add, constraint=_slow_on_cpu), CPU_CASES, runs_after=_RUNS_AFTER)
