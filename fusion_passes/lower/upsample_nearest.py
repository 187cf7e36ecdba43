"""Nearest-neighbour upsampling by whole numbers: UpsampleNearest, for GPU libraries with such a kernel.

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
from math import ceil, floor

import onnx_ir as ir

from fusion_passes.operators.record import DOMAIN
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


def upsample_nearest(model: ir.Model) -> int:
    """Rewrite the Resize nodes of `model` in place; returns how many."""
    nodes = [node for node in model.graph if node.op_type == "Resize" and node.domain == ""]
    facts = infer(model.graph) if nodes else Facts()
    made = 0
    for node in nodes:
        times = repeats(node, facts)
        if times is not None and _fits(node, times):
            _replace(model.graph, node, *times[1:3])
            made += 1
    return made


def _fits(node: ir.Node, times: list[int]) -> bool:
    x = node.inputs[0]
    floats = x is not None and x.dtype in FLOATS
    pictures = len(times) == 4 and times[0] == times[3] == 1
    nearest = node.attributes.get_string("mode", "nearest") == "nearest" and not node.attributes.get_int("antialias", 0)
    copies = nearest and all(_repeats_pixels(node, scale) for scale in times)
    return floats and pictures and copies and max(times) > 1


def _repeats_pixels(node: ir.Node, scale: int) -> bool:
    """Whether all `scale` copies are of the pixel itself: the first and the last, as the others lie between."""
    place = PLACES.get(node.attributes.get_string("coordinate_transformation_mode", "half_pixel") or "")
    rounded = ROUNDINGS.get(node.attributes.get_string("nearest_mode", "round_prefer_floor") or "")
    if place is None or rounded is None:
        return False
    return all(rounded(place(copy, scale)) == 0 for copy in (0, scale - 1))


def _replace(graph: ir.Graph, node: ir.Node, scale_height: int, scale_width: int) -> None:
    attributes = {"scale_height": scale_height, "scale_width": scale_width}
    new = ir.node("UpsampleNearest", [node.inputs[0]], attributes, domain=DOMAIN)
    new.metadata_props.update(node.metadata_props)
    old, made = node.outputs[0], new.outputs[0]
    made.name, made.type, made.shape = old.name, old.type, old.shape
    graph.insert_before(node, new)
    ir.convenience.replace_all_uses_with(old, made, replace_graph_outputs=True)
    graph.remove(node, safe=True)
