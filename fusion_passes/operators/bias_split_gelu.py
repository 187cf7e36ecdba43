"""BiasSplitGelu(X, bias) = left * gelu(right), left and right the halves of X + bias (Shazeer 2020, GEGLU).

X [N,S,2D].
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators.definition import FusedOperator, never
from fusion_passes.shapes.shape_info import Shape, ShapeInfo, input_shape


def body(node: ir.Node) -> tuple[str, str]:
    return (
        "",
        """(X, bias) => (Y) {
        biased = Add (X, bias)
        left, right = Split <axis = -1, num_outputs = 2> (biased)
        gate = Gelu (right)
        Y = Mul (left, gate)
    }""",
    )


def shape(node: ir.Node, info: ShapeInfo) -> list[Shape]:
    x = input_shape(node, 0, info)
    return [(*x[:-1], x[-1] // 2)]


OPERATOR = FusedOperator("BiasSplitGelu", shape, body, has_cpu_kernel=never, float8_output=1)
