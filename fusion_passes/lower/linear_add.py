"""Matrix products that add their bias and a residual themselves: LinearAdd, for GPU libraries with such epilogues.

    MatMul(x, w) -> BiasAdd(., b, skip)                     =>  LinearAdd(x, w, b, skip)
    NhwcConv 1x1 (x, w, b?)                                 =>  LinearAdd(x, w', b?)
    NhwcConv 1x1 (x, w) -> BiasAdd(., b, skip)              =>  LinearAdd(x, w', b, skip)
    NhwcConv 1x1 (x, w) -> SkipGroupNorm(., g, h, skip, b)  =>  LinearAdd(x, w', b, skip) -> s -> GroupNorm(s, g, h)
    MatMul(x, w) -> Reshape -> BiasAdd(., b, skip)          =>  LinearAdd(Reshape(x), w, b, skip)    of a square w
    MatMul(x, w) -> Add(., b)                               =>  LinearAdd(x, w, b)
    MatMul(x, w)                                            =>  LinearAdd(x, w)

A convolution of one pixel is a matrix product over NHWC tensors. The last rule only gives the product to the operator
whose algorithm can be tuned. `SHORTCUTS_FIRST` leaves a residual to SkipGroupNorm where its product has fewer columns
than it reads of a convolution: it then runs before the block that it goes around, and the image that it read, the
widest of a VAE decoder, is free for the norm that begins the block. Left alone: weights that are not constant matrices,
grouped, strided or padded convolutions, results that something else reads too. Runs after `nhwc_layout`, `pack_qkv`,
`fold_bias` and, where it runs, `linear_split_gelu`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

import onnx_ir as ir

from fusion_passes import checks as c
from fusion_passes.lower import fold_bias, linear_split_gelu, nhwc_layout, pack_qkv
from fusion_passes.operators.record import DOMAIN
from fusion_passes.pass_ import Case, Outcome, Pass, Refusal
from fusion_passes.rewriting import derived, take_place


@dataclass
class _Product:
    """A node that multiplies `x` (..., K) by a matrix (K, N), and the bias it adds."""

    node: ir.Node
    x: ir.Value
    bias: ir.Value | None


def linear_add(model: ir.Model, shortcuts_first: bool = False) -> Outcome:
    """Rewrite the products of `model` in place; counts them."""
    outcome = Outcome(Counter(linear_add=0))
    for node in list(model.graph):
        if node.op_type == "Add" and node.domain == "":
            outcome.counts["linear_add"] += _add(model.graph, node)
            continue
        if node.domain != DOMAIN or node.op_type not in ("BiasAdd", "SkipGroupNorm"):
            continue
        if shortcuts_first and node.op_type == "SkipGroupNorm" and _narrows(node):
            continue
        if (_bias_add if node.op_type == "BiasAdd" else _skip_group_norm)(model.graph, node):
            outcome.counts["linear_add"] += 1
        else:
            outcome.refused.append(Refusal(node, "none of its terms is a product that it alone reads, of its shape"))
    for node in list(model.graph):
        if node.op_type not in ("MatMul", "NhwcConv"):
            continue
        product = _product(node)
        if product is not None:
            _insert(model.graph, node, product, node.outputs[0], product.bias, None)
            model.graph.remove(node, safe=True)
            outcome.counts["linear_add"] += 1
        elif reason := _why_no_product(node):
            outcome.refused.append(Refusal(node, reason))
    return outcome


def _why_no_product(node: ir.Node) -> str | None:
    """Why a MatMul or NhwcConv is no product with a constant matrix, or None."""
    x, weight = node.inputs[:2]
    if x is None or (c.rank(x) or 0) < 2:
        return "its input is no matrix, or of unknown rank"
    if not c.is_constant(weight):
        return "its weight is not constant"
    if node.op_type == "MatMul":
        return None if c.rank(weight) == 2 else "its weight is no matrix"
    return None if _is_one_pixel(node) else "its filters are not of one pixel, without groups, strides and pads"


def _product(node: ir.Node | None) -> _Product | None:
    if node is None or node.op_type not in ("MatMul", "NhwcConv") or _why_no_product(node) is not None:
        return None
    x = node.inputs[0]
    assert x is not None
    has_bias = node.op_type == "NhwcConv" and len(node.inputs) > 2
    return _Product(node, x, node.inputs[2] if has_bias else None)


def _is_one_pixel(conv: ir.Node) -> bool:
    attributes = conv.attributes
    plain = attributes.get_int("group", 1) == 1 and attributes.get_string("auto_pad", "NOTSET") == "NOTSET"
    strides, pads = attributes.get_ints("strides", [1, 1]), attributes.get_ints("pads", [0, 0, 0, 0])
    size = [c.size(conv.inputs[1], axis) for axis in (1, 2)]
    return plain and size == [1, 1] and not any(pads or ()) and all(stride == 1 for stride in strides or ())


def _alone(value: ir.Value | None) -> _Product | None:
    """The product without a bias that yields `value` for one reader."""
    if value is None or len(list(value.uses())) != 1 or value.is_graph_output():
        return None
    product = _product(value.producer())
    return product if product is not None and product.bias is None else None


def _bias_add(graph: ir.Graph, node: ir.Node) -> bool:
    x, bias, skip = node.inputs
    for value, other in ((x, skip), (skip, x)):
        if not c.same_shape(value, other):
            continue
        product, reshape = _alone(value), None
        if product is None and (reshape := _reshape_of_square(value)) is not None:
            product = _alone(reshape.inputs[0])
            assert product is not None
            product = replace(product, x=_reshaped_too(graph, node, reshape, product.x))
        if product is None:
            continue
        _insert(graph, node, product, node.outputs[0], bias, other)
        for old in (node, reshape, product.node):
            if old is not None:
                graph.remove(old, safe=True)
        return True
    return False


def _reshape_of_square(value: ir.Value | None) -> ir.Node | None:
    """The Reshape that yields `value` for one reader of the product of some x by a square matrix, whose shape is x's.

    The last axis is neither split nor joined.
    """
    if value is None or len(list(value.uses())) != 1 or value.is_graph_output():
        return None
    node = value.producer()
    product = _alone(node.inputs[0]) if node is not None and node.op_type == "Reshape" else None
    if node is None or product is None or product.node.op_type != "MatMul":
        return None
    width = c.size(product.x, -1)
    return node if width is not None and width == c.size(node.inputs[0], -1) == c.size(value, -1) else None


def _reshaped_too(graph: ir.Graph, before: ir.Node, reshape: ir.Node, x: ir.Value) -> ir.Value:
    """x, of the shape that `reshape` reads, as it would make it."""
    old = reshape.outputs[0]
    made = ir.node("Reshape", [x, reshape.inputs[1]], {k: a.value for k, a in reshape.attributes.items()})
    result = made.outputs[0]
    result.name, result.type, result.shape = f"{old.name}.rows", old.type, old.shape
    graph.insert_before(before, made)
    return result


def _add(graph: ir.Graph, node: ir.Node) -> bool:
    for value, bias in (node.inputs, node.inputs[::-1]):
        product = _alone(value)
        if product is not None and product.node.op_type == "MatMul" and c.is_vector(bias, c.size(value, -1)):
            _insert(graph, node, product, node.outputs[0], bias, None)
            graph.remove(node, safe=True)
            graph.remove(product.node, safe=True)
            return True
    return False


def _narrows(norm: ir.Node) -> bool:
    """Whether a SkipGroupNorm adds a product of fewer columns than it reads of a convolution's result."""
    for product in (_alone(norm.inputs[0]), _alone(norm.inputs[3])):
        made = None if product is None else product.x.producer()
        if product is None or made is None or made.op_type != "NhwcConv":
            continue
        read, written = c.size(product.x, -1), c.size(product.node.outputs[0], -1)
        if read is not None and written is not None and written < read:
            return True
    return False


def _skip_group_norm(graph: ir.Graph, node: ir.Node) -> bool:
    x, gamma, beta, skip = node.inputs[:4]
    bias = node.inputs[4] if len(node.inputs) > 4 else None
    for value, other in ((x, skip), (skip, x)):
        product = _alone(value)
        if product is None or not c.same_shape(value, other):
            continue
        normal, total = node.outputs
        summed = _insert(graph, node, product, total, bias, other)
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        norm = ir.node("GroupNorm", [summed, gamma, beta], attributes, domain=DOMAIN)
        norm.metadata_props.update(node.metadata_props)
        take_place(graph, node, norm, normal)
        graph.remove(node, safe=True)
        graph.remove(product.node, safe=True)
        return True
    return False


def _insert(
    graph: ir.Graph,
    before: ir.Node,
    product: _Product,
    output: ir.Value,
    bias: ir.Value | None,
    skip: ir.Value | None,
) -> ir.Value:
    """A LinearAdd in front of `before`, whose result takes the place of `output`."""
    inputs: list[ir.Value | None] = [product.x, _matrix(graph, product.node), bias, skip]
    while inputs[-1] is None:
        inputs.pop()
    new = ir.node("LinearAdd", inputs, domain=DOMAIN)
    new.metadata_props.update(product.node.metadata_props)
    take_place(graph, before, new, output)
    return new.outputs[0]


def _matrix(graph: ir.Graph, node: ir.Node) -> ir.Value:
    """The weight as (K, N)."""
    weight = node.inputs[1]
    assert weight is not None
    if node.op_type == "MatMul":
        return weight
    filters, channels = c.size(weight, 0), c.size(weight, 3)
    assert filters is not None
    assert channels is not None
    return derived(graph, f"{node.outputs[0].name}.matrix", [weight], [channels, filters], "matrix", filters)


def _case(name: str, body: str, fires: int = 1, refused: str | None = None, **ops: int) -> Case:
    graph = f"""<ir_version: 10, opset_import: ["" : 21]>
        f (float[N,H,W,8] xt, float[N,H,W,8] yt, float[N,8,W,H] t) => (float[N,8,P,Q] z)
        <float[8,8,3,3] k, float[8,8,1,1] p, float[8,1,1,1] q, float[8] b, float[8] c, float[8] g, float[8] h,
         float[8,8] w, float[16,8] v, float[16,8,3,3] k1, float[8,16,3,3] k2, float[8,16,1,1] k3,
         int64[3] rows = {{0, -1, 8}}, int64[3] wide = {{0, -1, 16}}> {{
            x = Transpose <perm = [0, 3, 1, 2]> (xt)  y = Transpose <perm = [0, 3, 1, 2]> (yt)
            {body}
        }}"""
    return Case(name, graph, fires, {"LinearAdd": fires, **ops}, refused, {"N": 2, "H": 4, "W": 4})


_CONV = "a = Conv <pads = [1, 1, 1, 1]> (x, k, b)"
_NORM = "GroupNormalization <num_groups = 2>"
# A linear layer over the image's rows, and back.
_FIRST = "i = Transpose <perm = [0, 2, 3, 1]> (x)"
_ROWS = f"{_FIRST}  r = Reshape (i, rows)  m = MatMul (r, w)"
_WIDE = f"{_FIRST}  d = Concat <axis = 3> (i, i)  r = Reshape (d, wide)  m = MatMul (r, v)"
_IMAGE = "o = Shape (i)  u = Reshape (a, o)  z = Transpose <perm = [0, 3, 1, 2]> (u)"
_ADDED = f"{_IMAGE.replace('z =', 'e =')}  z = Add (e, y)"
CASES = [
    _case("1x1", "z = Conv (x, p, b)", NhwcConv=0),
    _case("residual", "a = Conv (x, p, b)  z = Add (a, y)", BiasAdd=0, Add=0),
    _case("shortcut", f"{_CONV}  d = Conv (y, p, c)  z = Add (a, d)", NhwcConv=1, BiasAdd=0),
    _case("norm", f"a = Conv (x, p, b)  s = Add (a, y)  z = {_NORM} (s, g, h)", GroupNorm=1, SkipGroupNorm=0),
    _case("sum read too", f"a = Conv (x, p, b)  s = Add (a, y)  n = {_NORM} (s, g, h)  z = Add (s, n)", GroupNorm=1),
    _case("bias", f"{_ROWS}  a = Add (b, m)  {_IMAGE}", Add=0, MatMul=0),
    _case("product read twice", f"{_ROWS}  a = Add (m, b)  d = Mul (a, m)  {_IMAGE.replace('(a', '(d')}", Add=1),
    _case("rows", f"{_ROWS}  a = Add (m, b)  {_ADDED}", Add=0, BiasAdd=0),
    _case("rows of another width", f"{_WIDE}  a = Add (m, b)  {_ADDED}", BiasAdd=1),
    _case("two images", "z = MatMul (x, t)", 0, "not constant", MatMul=1),
    _case("3x3", _CONV.replace("a =", "z ="), 0, "one pixel", NhwcConv=1),
    _case("strided", "z = Conv <strides = [2, 2]> (x, p, b)", 0, "one pixel", NhwcConv=1),
    _case("grouped", "z = Conv <group = 8> (x, q, b)", 0, "one pixel", NhwcConv=1),
    _case("sum of others", f"{_CONV}  z = Add (a, y)", 0, "none of its terms", BiasAdd=1),
]

# A block that halves the channels of e, and its shortcut.
_WIDER = "Conv <pads = [1, 1, 1, 1]> (x, k1)"
_BLOCK = "a = Conv <pads = [1, 1, 1, 1]> (e, k2)  d = Conv (e, k3, c)  s = Add (a, d)"
SHORTCUT_CASES = [
    _case("first", f"e = {_WIDER}  {_BLOCK}  z = {_NORM} (s, g, h)", SkipGroupNorm=1, GroupNorm=0),
    _case("of another image", f"i = {_WIDER}  e = Relu (i)  {_BLOCK}  z = {_NORM} (s, g, h)", GroupNorm=1),
    _case("as wide", f"{_CONV}  d = Conv (y, p, c)  s = Add (a, d)  z = {_NORM} (s, g, h)", GroupNorm=1),
    _case("sum of others", f"{_CONV}  z = Add (a, y)", 0, "none of its terms", BiasAdd=1),
]

_AFTER = (nhwc_layout.PASS, fold_bias.PASS, pack_qkv.PASS, linear_split_gelu.PASS)
PASS = Pass("linear_add", linear_add, CASES, after=_AFTER)
SHORTCUTS_FIRST = Pass(
    "linear_add_shortcuts_first", partial(linear_add, shortcuts_first=True), SHORTCUT_CASES, after=_AFTER
)
