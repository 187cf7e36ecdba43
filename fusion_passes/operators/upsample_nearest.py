"""UpsampleNearest(X; scale_height, scale_width): each pixel of X [N,H,W,C] repeated down and across."""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators.record import Operator
from fusion_passes.shapes.dims import constant
from fusion_passes.shapes.facts import Facts, Shape, shape_of


def body(node: ir.Node) -> tuple[str, str]:
    """Its form and its meaning in standard ONNX."""
    return (
        "",
        """(X) => (Y) {
        height = Constant <value_int: int = @scale_height> ()
        width = Constant <value_int: int = @scale_width> ()
        all = Constant <value_ints = [-1]> ()
        one = Constant <value_ints = [1]> ()
        down = Reshape (height, all)
        across = Reshape (width, all)
        times = Concat <axis = 0> (one, down, across, one)
        scales = Cast <to = 1> (times)
        Y = Resize <mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor">
            (X, , scales)
    }""",
    )


def shape(node: ir.Node, facts: Facts) -> list[Shape] | None:
    """The shape of the output, or None when it is not known."""
    x, times = shape_of(node, 0, facts), [node.attributes[f"scale_{side}"].as_int() for side in ("height", "width")]
    return [(x[0], x[1] * constant(times[0]), x[2] * constant(times[1]), x[3])] if len(x) == 4 else None


OPERATOR = Operator(
    "UpsampleNearest",
    shape,
    body,
    ("scale_height", "scale_width"),
    exact=True,
)
