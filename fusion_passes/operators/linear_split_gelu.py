"""LinearSplitGelu(X, W, bias) = left * gelu(right), left and right the halves of X W + bias: MatMul and BiasSplitGelu.

X [..., K], W [K, 2N], bias [2N].
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators.record import Operator
from fusion_passes.shapes.facts import Facts, Shape, shape_of


def body(node: ir.Node) -> tuple[str, str]:
    """Its form and its meaning in standard ONNX."""
    return (
        "",
        """(X, W, bias) => (Y) {
        product = MatMul (X, W)
        biased = Add (product, bias)
        left, right = Split <axis = -1, num_outputs = 2> (biased)
        gate = Gelu (right)
        Y = Mul (left, gate)
    }""",
    )


def shape(node: ir.Node, facts: Facts) -> list[Shape]:
    """The shape of the output."""
    x, weight = shape_of(node, 0, facts), shape_of(node, 1, facts)
    return [(*x[:-1], weight[-1] // 2)]


OPERATOR = Operator("LinearSplitGelu", shape, body, counted=False)
