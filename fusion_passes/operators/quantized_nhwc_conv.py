"""QuantizedNhwcConv(X, W, scale, B, skip?): a 3x3 convolution of float8 elements with pads 1 and stride 1, for GPUs.

Y = conv(X, W) scale + B + skip: X [N,H,W,C] and W [M,3,3,C] in float8e4m3fn, scale one number or [M] in float32, B [M],
skip and Y [N,H,W,M].
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators.body_snippets import has
from fusion_passes.operators.definition import FusedOperator, never
from fusion_passes.shapes.shape_info import Shape, ShapeInfo, input_shape


def body(node: ir.Node) -> tuple[str, str]:
    skip = has(node, 4)
    return (
        "skip" if skip else "",
        f"""({"X, W, scale, B, skip" if skip else "X, W, scale, B"}) => (Y) {{
        x = Cast <to = 1> (X)
        w = Cast <to = 1> (W)
        x_nchw = Transpose <perm = [0, 3, 1, 2]> (x)
        w_nchw = Transpose <perm = [0, 3, 1, 2]> (w)
        y_nchw = Conv <pads = [1, 1, 1, 1]> (x_nchw, w_nchw)
        product = Transpose <perm = [0, 2, 3, 1]> (y_nchw)
        scaled = Mul (product, scale)
        values = CastLike (scaled, B)
        sum = Add (values, B)
        Y = {"Add (sum, skip)" if skip else "Identity (sum)"}
    }}""",
    )


def shape(node: ir.Node, info: ShapeInfo) -> list[Shape] | None:
    x, weight = input_shape(node, 0, info), info.shapes.get(node.inputs[1]) if node.inputs[1] else None
    return None if weight is None or len(x) != 4 else [(*x[:3], weight[0])]


OPERATOR = FusedOperator("QuantizedNhwcConv", shape, body, float32_inputs=(2,), has_cpu_kernel=never, dtype_input=3)
