"""Lowers a channels-last convolution, the image added to it and its Relu to one NhwcConv of the op library.

    NhwcConv(x, w, b?) -> Relu                           =>  NhwcConv(x, w, b?; relu)
    NhwcConv(x, w) -> BiasAdd(., b, skip) -> Relu        =>  NhwcConv(x, w, b, skip; relu)

Small VAEs (TAESD) and image adapters consist of these. A sum without Relu stays: it gains nothing (`fold_bias`).
Rejected: results with other consumers, padding by auto_pad, which the kernels do not have. 1x1 convolutions are
LinearAdd by then. Runs after `fold_bias`, `linear_add` and `subpixel_conv`.
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes import DOMAIN
from fusion_passes import value_queries as values
from fusion_passes.graph_edits import replace_nodes
from fusion_passes.graph_pass import Pass, PassCase, PassOutcome, rewrite_nodes
from fusion_passes.lower import fold_bias, linear_add, nhwc_layout, subpixel_conv, upsample_nearest

Match = tuple[ir.Node, ir.Node | None]  # a convolution, and the BiasAdd that reads it


def conv_relu(model: ir.Model) -> PassOutcome:
    """Fuse the Relus of `model` into their convolutions in place; count them."""
    return rewrite_nodes(model, "conv_relu", "Relu", _reject_reason, _rewrite)


def _reject_reason(relu: ir.Node) -> str | None:
    match = _match(relu)
    return match if isinstance(match, str) else None


def _match(relu: ir.Node) -> Match | str:
    """Return the nodes that compute the Relu's input, or the reason why they cannot be fused."""
    add = _producer(relu.inputs[0], "BiasAdd")
    if add is None:
        conv = _producer(relu.inputs[0], "NhwcConv")
    elif not values.has_one_use(add.outputs[0]):
        return "the sum has other consumers"
    else:
        addends = [_producer(value, "NhwcConv") for value in _images(add)]
        bare = [conv for conv in addends if conv is not None and len(conv.inputs) == 2]
        conv = next((conv for conv in bare if values.has_one_use(conv.outputs[0])), bare[0] if bare else None)
    if conv is None:
        return "its input is not computed by a channels-last convolution"
    if not values.has_one_use(conv.outputs[0]):
        return "the convolution's result has other consumers"
    if conv.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
        return "the convolution is padded by auto_pad"
    return conv, add


def _producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """Return the node of domain `sd_ort` and this type that computes `value`, or None."""
    node = None if value is None else value.producer()
    return node if node is not None and node.domain == DOMAIN and node.op_type == op_type else None


def _images(add: ir.Node) -> list[ir.Value | None]:
    return [add.inputs[0], add.inputs[2] if len(add.inputs) > 2 else None]


def _rewrite(graph: ir.Graph, relu: ir.Node) -> None:
    match = _match(relu)
    assert not isinstance(match, str)
    conv, add = match
    inputs = list(conv.inputs)
    if add is not None:
        skips = [value for value in _images(add) if value is not None and value is not conv.outputs[0]]
        inputs += [add.inputs[1], *skips]
    new = ir.node("NhwcConv", inputs, {**conv.attributes, "relu": ir.AttrInt64("relu", 1)}, domain=DOMAIN)
    replace_nodes(graph, new, conv, relu, *([] if add is None else [add]), conv)


def _case(
    name: str, body: str, rewrites: int = 1, rejection: str | None = None, outputs: str = "", **ops: int
) -> PassCase:
    graph = f"""<ir_version: 10, opset_import: ["" : 21]>
        f (float[N,H,W,8] xt, float[N,H,W,8] yt) => (float[N,8,H,W] z{outputs})
        <float[8,8,3,3] k, float[8,8,3,3] l, float[8,8,1,1] p, float[8] b, float[8] c> {{
            x = Transpose <perm = [0, 3, 1, 2]> (xt)  y = Transpose <perm = [0, 3, 1, 2]> (yt)
            {body}
        }}"""
    return PassCase(name, graph, rewrites, ops, rejection, {"N": 2, "H": 5, "W": 6})


_PADS = "pads = [1, 1, 1, 1]"
_CONV = f"a = Conv <{_PADS}> (x, k, b)"
_NEXT = f"z = Conv <{_PADS}> (r, l, c)"
_TWICE = f"d = Conv <{_PADS}> (y, l, c)"
_D = ", float[N,8,H,W] a"
CASES = [
    _case("Relu", f"{_CONV}  r = Relu (a)  {_NEXT}", NhwcConv=2, Relu=0),
    _case("no bias", f"a = Conv <{_PADS}> (x, k)  r = Relu (a)  {_NEXT}", NhwcConv=2, Relu=0),
    _case("dilated", f"a = Conv <pads = [2, 2, 2, 2], dilations = [2, 2]> (x, k, b)  r = Relu (a)  {_NEXT}", Relu=0),
    _case("two of them", f"{_CONV}  r = Relu (a)  {_NEXT.replace('z', 'e')}  z = Relu (e)", 2, NhwcConv=2, Relu=0),
    _case("an image added", f"{_CONV}  s = Add (a, y)  r = Relu (s)  {_NEXT}", NhwcConv=2, BiasAdd=0, Relu=0),
    _case("another convolution added", f"{_CONV}  {_TWICE}  s = Add (a, d)  r = Relu (s)  {_NEXT.replace('c)', 'b)')}",
          NhwcConv=3, BiasAdd=0, Relu=0),
    _case("a 1x1 convolution, which LinearAdd computes", f"a = Conv (x, p, b)  r = Relu (a)  {_NEXT}", 0,
          "not computed by", LinearAdd=1, Relu=1),
    _case("read before Relu too", f"{_CONV}  r = Relu (a)  e = Conv <{_PADS}> (r, l)  z = Mul (e, a)", 0,
          "result has other consumers", Relu=1),
    _case("an output of the graph", f"{_CONV}  r = Relu (a)  {_NEXT}", 0, "result has other consumers", _D, Relu=1),
    _case("a sum that is read too", f"{_CONV}  s = Add (a, y)  r = Relu (s)  e = Conv <{_PADS}> (r, l)"
          "  z = Mul (e, s)", 0, "sum has other consumers", Relu=1, BiasAdd=1),
    _case("padded by auto_pad", f'a = Conv <auto_pad = "SAME_UPPER"> (x, k, b)  r = Relu (a)  {_NEXT}', 0, "auto_pad",
          Relu=1),
    _case("something between", f"{_CONV}  s = Sigmoid (a)  r = Relu (s)  {_NEXT}", 0, "not computed by", Relu=1),
    _case("another activation", f"{_CONV}  r = Sigmoid (a)  {_NEXT}", 0, Sigmoid=1, NhwcConv=2),
]  # fmt: skip

PASS = Pass(
    "conv_relu",
    conv_relu,
    CASES,
    runs_after=(nhwc_layout.PASS, fold_bias.PASS, linear_add.PASS, upsample_nearest.PASS, subpixel_conv.PASS),
)
