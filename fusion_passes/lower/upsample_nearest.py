"""Lowers nearest-neighbor Resize with integer scales to UpsampleNearest.

    Resize(x, scales [1, s, t, 1]), nearest         =>  UpsampleNearest(x; scale_height=s, scale_width=t)
    Resize(x, sizes [n, s*h, t*w, c]), nearest      =>  the same, x proven to be [n, h, w, c]

Each pixel must be repeated s times along the height and t times along the width. Rejected: attributes that select
another pixel anywhere (align_corners and, for most scales, a nearest_mode that does not match the coordinates);
fractional scales; downsampling; scales of the first or last axis (the channels, after `nhwc_layout`); the attribute
`axes`; dtypes other than floating point. Runs after `nhwc_layout`.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from math import ceil, floor

import onnx_ir as ir

from fusion_passes import DOMAIN
from fusion_passes.graph_edits import replace_nodes
from fusion_passes.graph_pass import Pass, PassCase, PassOutcome, rewrite_nodes
from fusion_passes.lower import nhwc_layout
from fusion_passes.shapes.infer import infer
from fusion_passes.shapes.rules import integer_scales
from fusion_passes.shapes.shape_info import ShapeInfo

FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
HALF = Fraction(1, 2)


def _half_pixel(copy: int, scale: int) -> Fraction:
    return (copy + HALF) / scale - HALF


# Coordinate of copy i (0 .. scale - 1) of a pixel, relative to that pixel, by coordinate_transformation_mode. The three
# half_pixel modes differ only for outputs of one pixel, or for scales that are not quotients of sizes.
COORDINATES: dict[str, Callable[[int, int], Fraction]] = {
    "asymmetric": Fraction,
    "half_pixel": _half_pixel,
    "half_pixel_symmetric": _half_pixel,
    "pytorch_half_pixel": _half_pixel,
}
ROUNDINGS: dict[str, Callable[[Fraction], int]] = {
    "floor": floor,
    "ceil": ceil,
    "round_prefer_floor": lambda x: ceil(x - HALF),
    "round_prefer_ceil": lambda x: floor(x + HALF),
}


def upsample_nearest(model: ir.Model) -> PassOutcome:
    """Rewrite the Resize nodes of `model` in place."""
    resizes = any(node.op_type == "Resize" for node in model.graph)
    info = infer(model.graph) if resizes else ShapeInfo()
    return rewrite_nodes(model, "upsample_nearest", "Resize", partial(_reject_reason, info), partial(_rewrite, info))


def _reject_reason(info: ShapeInfo, node: ir.Node) -> str | None:
    x, scales = node.inputs[0], integer_scales(node, info)
    if scales is None:
        return "its scales are not integers of at least 1"
    if x is None or x.dtype not in FLOATS:
        return "its input is not floating point"
    if len(scales) != 4 or not scales[0] == scales[3] == 1:
        return "it scales other axes than H and W of [N,H,W,C]"
    if max(scales) == 1:
        return "it changes no size"
    if node.attributes.get_string("mode", "nearest") != "nearest" or node.attributes.get_int("antialias", False):
        return "it interpolates"
    return None if all(_repeats_pixels(node, scale) for scale in scales) else "it selects other pixels than the nearest"


def _repeats_pixels(node: ir.Node, scale: int) -> bool:
    """Return whether all `scale` copies are of the pixel itself. Checking the first and the last one is enough."""
    coordinate = COORDINATES.get(node.attributes.get_string("coordinate_transformation_mode", "half_pixel") or "")
    rounding = ROUNDINGS.get(node.attributes.get_string("nearest_mode", "round_prefer_floor") or "")
    if coordinate is None or rounding is None:
        return False
    return all(rounding(coordinate(copy, scale)) == 0 for copy in (0, scale - 1))


def _rewrite(info: ShapeInfo, graph: ir.Graph, node: ir.Node) -> None:
    scales = integer_scales(node, info)
    assert scales is not None
    attributes = {"scale_height": scales[1], "scale_width": scales[2]}
    new = ir.node("UpsampleNearest", [node.inputs[0]], attributes, domain=DOMAIN)
    replace_nodes(graph, new, node, node)


# The convolution converts the image and its consumers to NHWC.
_HEAD = "n = Transpose <perm = [0, 3, 1, 2]> (y)  s = Conv (n, p)"
_FLOOR = 'coordinate_transformation_mode = "asymmetric", nearest_mode = "floor"'


def _case(
    name: str, mode: str, scales: str, rejection: str | None = None, head: str = _HEAD, operands: str = "s, , times"
) -> PassCase:
    graph = f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,8,H,W] x, float[N,H,W,8] y) => (float[O,P,Q,R] z)
        <float[8,8,1,1] p, float[4] times = {{{scales}}}, float[2] halves = {{2, 2}}, int64[2] twice = {{2, 3}},
         int64[2] more = {{6, 4}}, float[8] region = {{0, 0, 0.2, 0.2, 1, 1, 1.5, 0.8}}> {{
            {head}
            a = Resize <{mode}> ({operands})
            z = Cast <to = 1> (a)
        }}"""
    rewrites = int(rejection is None)
    return PassCase(
        name,
        graph,
        rewrites,
        {"UpsampleNearest": rewrites, "Resize": 1 - rewrites},
        rejection,
        {"N": 2, "H": 6, "W": 4},
    )


def _sized(last: str) -> str:
    sizes = "o = Shape <start = 0, end = 2> (s)  i = Shape <start = 2> (s)"
    return f"{_HEAD}  {sizes}  {last}  w = Concat <axis = 0> (o, l)"


def _rounded(coordinates: str, rounding: str) -> str:
    return f'coordinate_transformation_mode = "{coordinates}", nearest_mode = "{rounding}"'


_OTHER, _SCALES, _AXES = "other pixels", "not integers", "other axes"
_POLICY = _FLOOR + ', keep_aspect_ratio_policy = "not_larger"'
CASES = [
    _case("decoder", _FLOOR, "1, 1, 2, 2"),
    _case("down", _FLOOR, "1, 1, 3, 1"),
    _case("across", _FLOOR, "1, 1, 1, 4"),
    _case("defaults", 'mode = "nearest"', "1, 1, 2, 3"),
    _case("half pixel", _rounded("half_pixel", "round_prefer_ceil"), "1, 1, 3, 2"),
    _case("torch's half pixel", _rounded("pytorch_half_pixel", "round_prefer_floor"), "1, 1, 2, 5"),
    _case("symmetric", _rounded("half_pixel_symmetric", "round_prefer_floor"), "1, 1, 2, 3"),
    _case("asymmetric rounded", _rounded("asymmetric", "round_prefer_floor"), "1, 1, 2, 2"),
    _case("sizes", _FLOOR, "1, 1, 1, 1", None, _sized("l = Mul (i, twice)"), "s, , , w"),
    _case("channels last", _FLOOR, "1, 2, 2, 1", None, "", "x, , times"),
    _case("asymmetric rounded, 3", _rounded("asymmetric", "round_prefer_floor"), "1, 1, 3, 3", _OTHER),
    _case("other rounding", _rounded("asymmetric", "round_prefer_ceil"), "1, 1, 2, 2", _OTHER),
    _case("ceil", _rounded("asymmetric", "ceil"), "1, 1, 2, 2", _OTHER),
    _case("half pixel, floor", _rounded("half_pixel", "floor"), "1, 1, 2, 2", _OTHER),
    _case("align corners", _rounded("align_corners", "floor"), "1, 1, 2, 2", _OTHER),
    _case("linear", 'mode = "linear"', "1, 2, 2, 1", "interpolates", "", "x, , times"),
    _case("cubic", 'mode = "cubic"', "1, 1, 2, 2", _AXES),
    _case("fractional", _FLOOR, "1, 1, 1.5, 2", _SCALES),
    _case("smaller", _FLOOR, "1, 1, 0.5, 0.5", _SCALES),
    _case("channels", _FLOOR, "1, 2, 2, 2", _AXES),
    _case("batch", _FLOOR, "2, 1, 2, 2", _AXES),
    _case("nothing", _FLOOR, "1, 1, 1, 1", "changes no size"),
    _case("NCHW", _FLOOR, "1, 1, 2, 2", _AXES, "", "x, , times"),
    _case("axes", _FLOOR + ", axes = [2, 3]", "1, 1, 1, 1", _SCALES, operands="s, , halves"),
    _case("crop", _rounded("tf_crop_and_resize", "floor"), "1, 1, 2, 2", _AXES, operands="s, region, times"),
    _case("sizes not proven", _FLOOR, "1, 1, 1, 1", _SCALES, _sized("l = Add (i, more)"), "s, , , w"),
    _case("sizes with a policy", _POLICY, "1, 1, 1, 1", _SCALES, _sized("l = Add (i, i)"), "s, , , w"),
    _case("integers", _FLOOR, "1, 2, 2, 1", "floating point", "s = Cast <to = 6> (x)"),
]

PASS = Pass("upsample_nearest", upsample_nearest, CASES, runs_after=(nhwc_layout.PASS,))
