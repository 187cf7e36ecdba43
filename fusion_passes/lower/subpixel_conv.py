"""A 3 x 3 convolution of a doubled image, as one of the image before: 4/9 of the arithmetic, and no doubled image.

    UpsampleNearest(x; 2, 2) -> NhwcConv 3x3 (., w [M,3,3,C], b?; pads 1)
        =>  NhwcConv 2x2 (x, w' [4*M,2,2,C]; pads 1) -> SubpixelShuffle(., b?)

Of the nine pixels of the doubled image that one of the result reads, many are copies of one: it reads 2 x 2 pixels of
x, which ones and with which sums of its taps depends on whether its row and column are even or odd. So the four kinds
are a convolution each, exactly, borders included (a sub-pixel convolution: Shi et al., arXiv 1609.05158); all four run
as one of 4*M filters, on a grid with a row and a column more than x, and the shuffle picks each kind where it starts.
The taps are summed in float32 while the model is saved, and rounded once (`recipes.phases`); 16 take the place of 9, so
that SD 1.5's U-Net has 52 MB more of weights, of 1.7 GB. Left alone: other scales, filters, strides, pads, dilations,
groups, weights that are not constant, an upsampled image that something else reads too. Runs after `upsample_nearest`,
which proves that pixels are doubled, and `fold_bias`.
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes import checks as c
from fusion_passes.lower import nhwc_layout, upsample_nearest
from fusion_passes.operators.record import DOMAIN
from fusion_passes.pass_ import Case, Outcome, Pass, rewrite_nodes
from fusion_passes.rewriting import derived, take_place, unique


def subpixel_conv(model: ir.Model) -> Outcome:
    """Rewrite the UpsampleNearest nodes of `model`, and the convolutions behind them, in place."""
    return rewrite_nodes(model, "subpixel_conv", "UpsampleNearest", _refuse, _rewrite)


def _refuse(upsample: ir.Node) -> str | None:
    scales = [upsample.attributes[f"scale_{side}"].as_int() for side in ("height", "width")]
    if scales != [2, 2]:
        return f"it scales by {scales[0]} x {scales[1]}, not by 2 x 2"
    result = upsample.outputs[0]
    users = list(result.uses())
    if len(users) != 1 or result.is_graph_output():
        return "something else reads the upsampled image too"
    conv, index = users[0]
    if conv.op_type != "NhwcConv" or index != 0:
        return f"{conv.op_type} reads the upsampled image, not a convolution"
    return _refuse_conv(conv)


def _refuse_conv(conv: ir.Node) -> str | None:
    weight, attributes = conv.inputs[1], conv.attributes
    if not c.is_constant(weight):
        return "the convolution's weight is not constant"
    if [c.size(weight, axis) for axis in (1, 2)] != [3, 3]:
        return "the convolution's filters are not 3 x 3"
    if attributes.get_int("group", 1) != 1:
        return "the convolution has groups"
    for name in ("strides", "dilations"):
        if any(step != 1 for step in attributes.get_ints(name) or ()):
            return f"the convolution's {name} are not 1"
    named = attributes.get_string("auto_pad", "NOTSET") != "NOTSET"
    if named or any(pad != 1 for pad in attributes.get_ints("pads") or [0]):
        return "the convolution's pads are not 1"
    return None


def _rewrite(graph: ir.Graph, upsample: ir.Node) -> None:
    conv = next(iter(upsample.outputs[0].uses()))[0]
    x, weight, y = upsample.inputs[0], conv.inputs[1], conv.outputs[0]
    assert x is not None
    assert weight is not None
    count, channels = c.size(weight, 0), c.size(weight, 3)
    assert count is not None
    assert channels is not None
    summed = derived(graph, unique(y, "phases_weight"), [weight], [4 * count, 2, 2, channels], "phases")
    lists = {"dilations": [1, 1], "kernel_shape": [2, 2], "pads": [1, 1, 1, 1], "strides": [1, 1]}
    small = ir.node("NhwcConv", [x, summed], {"group": 1, **lists}, domain=DOMAIN)
    phases = small.outputs[0]
    phases.name, phases.type = f"{y.name}.phases", y.type
    if x.shape is not None:
        phases.shape = ir.Shape([x.shape[0], *(_one_more(x.shape[axis]) for axis in (1, 2)), 4 * count])
    shuffle = ir.node("SubpixelShuffle", [phases, *conv.inputs[2:]], domain=DOMAIN)
    for node in (small, shuffle):
        node.metadata_props.update(conv.metadata_props)
    graph.insert_before(conv, small)
    take_place(graph, conv, shuffle, y)
    graph.remove(conv, safe=True)
    graph.remove(upsample, safe=True)


def _one_more(size: int | ir.SymbolicDim) -> int | None:
    return size + 1 if isinstance(size, int) else None


def _case(name: str, body: str, fires: int = 1, refused: str | None = None, **ops: int) -> Case:
    """An image, brought into NHWC -> z."""
    graph = f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,H,W,8] x, float[12,8,3,3] given) => (float[N,P,Q,R] z)
        <float[8,8,1,1] p, float[12,8,3,3] k, float[12,4,3,3] half, float[12,8,1,1] k1,
         float[12,8,5,5] k5, float[12] b, float[4] times = {{1, 1, 2, 2}}, float[4] threefold = {{1, 1, 3, 3}},
         float[4] across = {{1, 1, 1, 2}}, float[4] fraction = {{1, 1, 1.5, 1.5}}, int64[2] two = {{2, 2}},
         int64[2] more = {{5, 3}}> {{
            n = Transpose <perm = [0, 3, 1, 2]> (x)  s = Conv (n, p)
            {body}
        }}"""
    return Case(name, graph, fires, {"SubpixelShuffle": fires, **ops}, refused, {"N": 2, "H": 5, "W": 3})


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
          "something else", NhwcConv=3),
    _case("no convolution", f"{_UP}  z = Relu (u)", 0, "Relu reads", NhwcConv=1),
    _case("something between", f"{_UP}  r = Relu (u)  {_CONV.replace('(u', '(r')}", 0, "Relu reads"),
    _case("a weight that is an input", _conv(f"<{_SAME}> (u, given, b)"), 0, "Transpose reads"),
]  # fmt: skip

PASS = Pass("subpixel_conv", subpixel_conv, CASES, after=(nhwc_layout.PASS, upsample_nearest.PASS))
