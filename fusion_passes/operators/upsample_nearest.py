"""UpsampleNearest(X; scale_height, scale_width): repeats each pixel of X [N,H,W,C] along both spatial axes."""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators.definition import FusedOperator
from fusion_passes.shapes.dims import constant
from fusion_passes.shapes.shape_info import Shape, ShapeInfo, input_shape


def body(node: ir.Node) -> tuple[str, str]:
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


def shape(node: ir.Node, info: ShapeInfo) -> list[Shape] | None:
    x, scales = input_shape(node, 0, info), [node.attributes[f"scale_{axis}"].as_int() for axis in ("height", "width")]
    return [(x[0], x[1] * constant(scales[0]), x[2] * constant(scales[1]), x[3])] if len(x) == 4 else None


OPERATOR = FusedOperator("UpsampleNearest", shape, body, ("scale_height", "scale_width"), copies_elements=True)
