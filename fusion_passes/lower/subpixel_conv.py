"""Lowers 2x nearest upsampling + 3x3 convolution to a 2x2 convolution of the smaller image: 4/9 of the arithmetic.

    UpsampleNearest(x; 2, 2) -> NhwcConv 3x3 (., w [M,3,3,C], b?; pads 1)
        =>  NhwcConv 2x2 (x, w' [4*M,2,2,C]; pads 1) -> SubpixelShuffle(., b?)

Of the nine pixels of the upsampled image under a filter many are copies: each output pixel depends on 2x2 pixels of x.
Which pixels, and which sums of taps, depends on the parity of the output row and column. Each of the four parities is
therefore a convolution of x, exactly, borders included (a sub-pixel convolution: Shi et al., arXiv 1609.05158). All
four run as one convolution with 4*M filters on a grid with one more row and column than x. SubpixelShuffle reads each
parity from its own offset. The taps are summed in float32 when the model is saved, and rounded once
(`weight_recipes.subpixel_phases`). 16 taps replace 9: SD 1.5's U-Net has 52 MB more of weights, of 1.7 GB. Rejected:
other scales, filters, strides, pads, dilations or groups, weights that are not constant, other consumers of the
upsampled image. Runs after `upsample_nearest`, which proves that the scale is 2, and `fold_bias`.
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes import DOMAIN
from fusion_passes import value_queries as values
from fusion_passes.graph_edits import new_derived_initializer, replace_nodes, unique_name
from fusion_passes.graph_pass import Pass, PassCase, PassOutcome, rewrite_nodes
from fusion_passes.lower import nhwc_layout, upsample_nearest


def subpixel_conv(model: ir.Model) -> PassOutcome:
    """Rewrite the UpsampleNearest nodes of `model` and the convolutions after them in place."""
    return rewrite_nodes(model, "subpixel_conv", "UpsampleNearest", _reject_reason, _rewrite)


def _reject_reason(upsample: ir.Node) -> str | None:
    scales = [upsample.attributes[f"scale_{side}"].as_int() for side in ("height", "width")]
    if scales != [2, 2]:
        return f"it scales by {scales[0]} x {scales[1]}, not by 2 x 2"
    result = upsample.outputs[0]
    uses = list(result.uses())
    if len(uses) != 1 or result.is_graph_output():
        return "the upsampled image has other consumers"
    conv, index = uses[0]
    if conv.op_type != "NhwcConv" or index != 0:
        return f"the consumer of the upsampled image is {conv.op_type}, not a convolution"
    if not values.is_constant(conv.inputs[1]):
        return "the convolution's weight is not constant"
    return same_size_3x3_reject_reason(conv)


def same_size_3x3_reject_reason(conv: ir.Node) -> str | None:
    """Return why an NhwcConv has not 3 x 3 filters, pads, strides and dilations of 1 and one group, or None."""
    weight, attributes = conv.inputs[1], conv.attributes
    if [values.size(weight, axis) for axis in (1, 2)] != [3, 3]:
        return "the convolution's filters are not 3 x 3"
    if attributes.get_int("group", 1) != 1:
        return "the convolution has groups"
    for name in ("strides", "dilations"):
        if any(step != 1 for step in attributes.get_ints(name) or ()):
            return f"the convolution's {name} are not 1"
    auto_pad = attributes.get_string("auto_pad", "NOTSET") != "NOTSET"
    if auto_pad or any(pad != 1 for pad in attributes.get_ints("pads") or [0]):
        return "the convolution's pads are not 1"
    return None


def _rewrite(graph: ir.Graph, upsample: ir.Node) -> None:
    conv = next(iter(upsample.outputs[0].uses()))[0]
    x, weight, y = values.operand(upsample, 0), values.operand(conv, 1), conv.outputs[0]
    count, channels = values.static_size(weight, 0), values.static_size(weight, 3)
    name, shape = unique_name(y, "phases_weight"), [4 * count, 2, 2, channels]
    filters = new_derived_initializer(graph, name, [weight], shape, "subpixel_phases")
    lists = {"dilations": [1, 1], "kernel_shape": [2, 2], "pads": [1, 1, 1, 1], "strides": [1, 1]}
    conv2x2 = ir.node("NhwcConv", [x, filters], {"group": 1, **lists}, domain=DOMAIN)
    phases = conv2x2.outputs[0]
    phases.name, phases.type = f"{y.name}.phases", y.type
    if x.shape is not None:
        phases.shape = ir.Shape([x.shape[0], *(_one_more(x.shape[axis]) for axis in (1, 2)), 4 * count])
    shuffle = ir.node("SubpixelShuffle", [phases, *conv.inputs[2:]], domain=DOMAIN)
    conv2x2.metadata_props.update(conv.metadata_props)
    graph.insert_before(conv, conv2x2)
    replace_nodes(graph, shuffle, conv, conv, upsample)


def _one_more(size: int | ir.SymbolicDim) -> int | None:
    return size + 1 if isinstance(size, int) else None


def _case(name: str, body: str, rewrites: int = 1, rejection: str | None = None, **ops: int) -> PassCase:
    """An NHWC image x -> z."""
    graph = f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,H,W,8] x, float[12,8,3,3] given) => (float[N,P,Q,R] z)
        <float[8,8,1,1] p, float[12,8,3,3] k, float[12,4,3,3] half, float[12,8,1,1] k1,
         float[12,8,5,5] k5, float[12] b, float[4] times = {{1, 1, 2, 2}}, float[4] threefold = {{1, 1, 3, 3}},
         float[4] across = {{1, 1, 1, 2}}, float[4] fraction = {{1, 1, 1.5, 1.5}}, int64[2] two = {{2, 2}},
         int64[2] more = {{5, 3}}> {{
            n = Transpose <perm = [0, 3, 1, 2]> (x)  s = Conv (n, p)
            {body}
        }}"""
    return PassCase(name, graph, rewrites, {"SubpixelShuffle": rewrites, **ops}, rejection, {"N": 2, "H": 5, "W": 3})


_FLOOR = 'coordinate_transformation_mode = "asymmetric", nearest_mode = "floor"'
_UP = f"u = Resize <{_FLOOR}> (s, , times)"
_SAME = "pads = [1, 1, 1, 1]"
_CONV = f"z = Conv <{_SAME}> (u, k, b)"
_AGAIN = f"v = Resize <{_FLOOR}> (n, , times)  d = Conv <{_SAME}> (v, k)  z = Add (a, d)"
_SIZES = "o = Shape <start = 0, end = 2> (s)  i = Shape <start = 2> (s)"


def _scaled(scales: str) -> str:
    return f"u = Resize <{_FLOOR}> (s, , {scales})  {_CONV}"


def _sized(last: str) -> str:
    return f"{_SIZES}  {last}  w = Concat <axis = 0> (o, l)  u = Resize <{_FLOOR}> (s, , , w)  {_CONV}"


def _mode(attributes: str) -> str:
    return f"u = Resize <{attributes}> (s, , times)  {_CONV}"


def _conv(call: str) -> str:
    return f"{_UP}  z = Conv {call}"


CASES = [
    _case("doubled", f"{_UP}  {_CONV}", UpsampleNearest=0),
    _case("no bias", _conv(f"<{_SAME}> (u, k)"), UpsampleNearest=0),
    _case("sizes", _sized("l = Mul (i, two)"), UpsampleNearest=0),
    _case("half pixel", _mode('mode = "nearest"'), UpsampleNearest=0),
    _case("all attributes", _conv(f"<{_SAME}, strides = [1, 1], dilations = [1, 1], group = 1> (u, k, b)")),
    _case("twice", f"{_UP}  a = Conv <{_SAME}> (u, k, b)  {_AGAIN}", 2, NhwcConv=3),
    _case("three times as large", _scaled("threefold"), 0, "3 x 3, not", UpsampleNearest=1),
    _case("across", _scaled("across"), 0, "1 x 2, not", UpsampleNearest=1),
    _case("fractional", _scaled("fraction"), 0, Resize=1),
    _case("sizes not proven", _sized("l = Add (i, more)"), 0, Resize=1),
    _case("linear", _mode('mode = "linear"'), 0, Resize=1),
    _case("cubic", _mode('mode = "cubic"'), 0, Resize=1),
    _case("other pixels", _mode('coordinate_transformation_mode = "half_pixel", nearest_mode = "floor"'), 0, Resize=1),
    _case("1 x 1", _conv("(u, k1, b)"), 0, "not 3 x 3"),
    _case("5 x 5", _conv("<pads = [2, 2, 2, 2]> (u, k5, b)"), 0, "not 3 x 3"),
    _case("stride", _conv(f"<{_SAME}, strides = [2, 2]> (u, k, b)"), 0, "strides"),
    _case("dilated", _conv("<pads = [2, 2, 2, 2], dilations = [2, 2]> (u, k, b)"), 0, "dilations"),
    _case("groups", _conv(f"<{_SAME}, group = 2> (u, half, b)"), 0, "groups"),
    _case("no pads", _conv("(u, k, b)"), 0, "pads"),
    _case("pads on one side", _conv("<pads = [0, 0, 1, 1]> (u, k, b)"), 0, "pads"),
    _case("padded by name", _conv('<auto_pad = "SAME_UPPER"> (u, k, b)'), 0, "pads"),
    _case("read twice", f"{_UP}  a = Conv <{_SAME}> (u, k, b)  d = Conv (u, k1)  z = Add (a, d)", 0,
          "other consumers", NhwcConv=3),
    _case("no convolution", f"{_UP}  z = Relu (u)", 0, "is Relu", NhwcConv=1),
    _case("something between", f"{_UP}  r = Relu (u)  {_CONV.replace('(u', '(r')}", 0, "is Relu"),
    _case("a weight that is an input", _conv(f"<{_SAME}> (u, given, b)"), 0, "is Transpose"),
]  # fmt: skip

PASS = Pass("subpixel_conv", subpixel_conv, CASES, runs_after=(nhwc_layout.PASS, upsample_nearest.PASS))
