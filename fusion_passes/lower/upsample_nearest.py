"""Nearest-neighbor upsampling by whole numbers: UpsampleNearest, for GPU libraries with such a kernel.

    Resize(x, scales [1, s, t, 1]), nearest         =>  UpsampleNearest(x; scale_height=s, scale_width=t)
    Resize(x, sizes [n, s*h, t*w, c]), nearest      =>  the same, x proven to be [n, h, w, c]

Each pixel must be repeated s times down and t times across: attributes that take another pixel somewhere are refused,
such as align_corners and, for most scales, a rounding that does not go with the coordinates. Left alone: fractional
scales, smaller results, scales of the first or the last axis (the channels, after `nhwc_layout`), the attribute `axes`,
other types than floating point. Runs after `nhwc_layout`.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from math import ceil, floor

import onnx_ir as ir

from fusion_passes.lower import nhwc_layout
from fusion_passes.operators.record import DOMAIN
from fusion_passes.pass_ import Case, Outcome, Pass, rewrite_nodes
from fusion_passes.rewriting import take_place
from fusion_passes.shapes.facts import Facts
from fusion_passes.shapes.infer import infer
from fusion_passes.shapes.rules import repeats

FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
HALF = Fraction(1, 2)


def _from_centre(copy: int, scale: int) -> Fraction:
    return (copy + HALF) / scale - HALF


# Where the standard places a copy (0 .. scale - 1) of a pixel, in pixels from it. The three of half a pixel differ only
# where results are of one pixel or scales are no quotients of sizes.
PLACES: dict[str, Callable[[int, int], Fraction]] = {
    "asymmetric": Fraction,
    "half_pixel": _from_centre,
    "half_pixel_symmetric": _from_centre,
    "pytorch_half_pixel": _from_centre,
}
ROUNDINGS: dict[str, Callable[[Fraction], int]] = {
    "floor": floor,
    "ceil": ceil,
    "round_prefer_floor": lambda place: ceil(place - HALF),
    "round_prefer_ceil": lambda place: floor(place + HALF),
}


def upsample_nearest(model: ir.Model) -> Outcome:
    """Rewrite the Resize nodes of `model` in place."""
    resizes = any(node.op_type == "Resize" for node in model.graph)
    facts = infer(model.graph) if resizes else Facts()
    return rewrite_nodes(model, "upsample_nearest", "Resize", partial(_refuse, facts), partial(_rewrite, facts))


def _refuse(facts: Facts, node: ir.Node) -> str | None:
    x, times = node.inputs[0], repeats(node, facts)
    if times is None:
        return "its scales are not whole numbers, 1 or more"
    if x is None or x.dtype not in FLOATS:
        return "its tensor is not of a floating point type"
    if len(times) != 4 or not times[0] == times[3] == 1:
        return "it scales something else than the axes in the middle of [N,H,W,C]"
    if max(times) == 1:
        return "it changes no size"
    if node.attributes.get_string("mode", "nearest") != "nearest" or node.attributes.get_int("antialias", False):
        return "it interpolates"
    return None if all(_repeats_pixels(node, scale) for scale in times) else "it takes other pixels than the nearest"


def _repeats_pixels(node: ir.Node, scale: int) -> bool:
    """Whether all `scale` copies are of the pixel itself: the first and the last, as the others lie between."""
    place = PLACES.get(node.attributes.get_string("coordinate_transformation_mode", "half_pixel") or "")
    rounded = ROUNDINGS.get(node.attributes.get_string("nearest_mode", "round_prefer_floor") or "")
    if place is None or rounded is None:
        return False
    return all(rounded(place(copy, scale)) == 0 for copy in (0, scale - 1))


def _rewrite(facts: Facts, graph: ir.Graph, node: ir.Node) -> None:
    times = repeats(node, facts)
    assert times is not None
    attributes = {"scale_height": times[1], "scale_width": times[2]}
    new = ir.node("UpsampleNearest", [node.inputs[0]], attributes, domain=DOMAIN)
    new.metadata_props.update(node.metadata_props)
    take_place(graph, node, new, node.outputs[0])
    graph.remove(node, safe=True)


# The convolution brings the image into NHWC, and with it what reads it.
_HEAD = "n = Transpose <perm = [0, 3, 1, 2]> (y)  s = Conv (n, p)"
_FLOOR = 'coordinate_transformation_mode = "asymmetric", nearest_mode = "floor"'


def _case(
    name: str, mode: str, scales: str, refused: str | None = None, head: str = _HEAD, operands: str = "s, , times"
) -> Case:
    graph = f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,8,H,W] x, float[N,H,W,8] y) => (float[O,P,Q,R] z)
        <float[8,8,1,1] p, float[4] times = {{{scales}}}, float[2] halves = {{2, 2}}, int64[2] twice = {{2, 3}},
         int64[2] more = {{6, 4}}, float[8] region = {{0, 0, 0.2, 0.2, 1, 1, 1.5, 0.8}}> {{
            {head}
            a = Resize <{mode}> ({operands})
            z = Cast <to = 1> (a)
        }}"""
    fires = int(refused is None)
    return Case(name, graph, fires, {"UpsampleNearest": fires, "Resize": 1 - fires}, refused, {"N": 2, "H": 6, "W": 4})


def _sized(last: str) -> str:
    sizes = "o = Shape <start = 0, end = 2> (s)  i = Shape <start = 2> (s)"
    return f"{_HEAD}  {sizes}  {last}  w = Concat <axis = 0> (o, l)"


def _rounded(coordinates: str, rounding: str) -> str:
    return f'coordinate_transformation_mode = "{coordinates}", nearest_mode = "{rounding}"'


_OTHER, _SCALES, _AXES = "other pixels", "whole numbers", "the axes in the middle"
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
    _case(
        "sizes not proven",
        _FLOOR,
        "1, 1, 1, 1",
        _SCALES,
        _sized("l = Add (i, more)"),
        "s, , , w",
    ),
    _case("sizes with a policy", _POLICY, "1, 1, 1, 1", _SCALES, _sized("l = Add (i, i)"), "s, , , w"),
    _case("integers", _FLOOR, "1, 2, 2, 1", "floating point", "s = Cast <to = 6> (x)"),
]

PASS = Pass("upsample_nearest", upsample_nearest, CASES, after=(nhwc_layout.PASS,))
