"""Bfloat16Conv(X, W, B?; stride, x_last, y_last): Conv of X [N,C,H,W] with filters W [M,C,3,3] (pads 1) or [M,C,1,1].

stride is 1 or 2. With x_last X is [N,H,W,C], with y_last Y is [N,H,W,M]. X is float32, W float32 or bfloat16; both are
rounded to bfloat16, and sums are in float32.
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators.body_snippets import has
from fusion_passes.operators.definition import FusedOperator
from fusion_passes.shapes.dims import constant
from fusion_passes.shapes.shape_info import Shape, ShapeInfo, input_shape

ROUNDED = """x = Cast <to = 16> (X)  X_rounded = Cast <to = 1> (x)
    w = Cast <to = 16> (W)  W_rounded = Cast <to = 1> (w)"""


def body(node: ir.Node) -> tuple[str, str]:
    bias = has(node, 2)
    overload, convolution = convolution_body(node, "B" if bias else "")
    return overload, f"(X, W{', B' if bias else ''}) => (Y) {{ {ROUNDED}  {convolution} }}"


def convolution_body(node: ir.Node, bias: str) -> tuple[str, str]:
    """Return the overload name, and text that convolves X_rounded by W_rounded to Y; `bias` may be empty."""
    size = None if node.inputs[1] is None or node.inputs[1].shape is None else node.inputs[1].shape[-1]
    stride = node.attributes.get_int("stride", 1)
    pad = 0 if size == 1 else 1
    pads = f"<pads = [{pad}, {pad}, {pad}, {pad}], strides = [{stride}, {stride}]> "
    overload = ("pixel" if size == 1 else "square") + ("_bias" if bias else "")
    overload += f"_stride{stride}" if stride > 1 else ""
    x, first = "X_rounded", ""
    if node.attributes.get_int("x_last", 0):
        x, first, overload = "first", "first = Transpose <perm = [0, 3, 1, 2]> (X_rounded)", f"{overload}_x_last"
    end = f"Y = Conv {pads}({x}, W_rounded{', ' + bias if bias else ''})"
    if node.attributes.get_int("y_last", 0):
        end = f"{end.replace('Y', 'y_first', 1)}  Y = Transpose <perm = [0, 2, 3, 1]> (y_first)"
        overload = f"{overload}_y_last"
    return overload, f"{first}  {end}"


def shape(node: ir.Node, info: ShapeInfo) -> list[Shape] | None:
    x, weight = input_shape(node, 0, info), info.shapes.get(node.inputs[1]) if node.inputs[1] else None
    if weight is None or len(x) != 4:
        return None
    x_last, y_last = (node.attributes.get_int(name, 0) for name in ("x_last", "y_last"))
    image = list(x[1:3] if x_last else x[2:])
    if node.attributes.get_int("stride", 1) == 2:
        image = [(edge - constant(1)) // 2 + constant(1) for edge in image]
    return [(x[0], *image, weight[0]) if y_last else (x[0], weight[0], *image)]


OPERATOR = FusedOperator("Bfloat16Conv", shape, body, ("stride", "x_last", "y_last"))
