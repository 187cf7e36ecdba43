"""BiasSplitGelu(X, bias) = left * gelu(right), left and right the halves of X + bias (Shazeer 2020, GEGLU).

X [N,S,2D].
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators.record import Operator, never
from fusion_passes.shapes.facts import Facts, Shape, shape_of


def body(node: ir.Node) -> tuple[str, str]:
    """Its form and its meaning in standard ONNX."""
    return (
        "",
        """(X, bias) => (Y) {
        biased = Add (X, bias)
        left, right = Split <axis = -1, num_outputs = 2> (biased)
        gate = Gelu (right)
        Y = Mul (left, gate)
    }""",
    )


def shape(node: ir.Node, facts: Facts) -> list[Shape]:
    """The shape of the output."""
    x = shape_of(node, 0, facts)
    return [(*x[:-1], x[-1] // 2)]


OPERATOR = Operator(
    "BiasSplitGelu",
    shape,
    body,
    on_cpu=never,
)
