"""LinearSplitGelu(X, W, bias) = left * gelu(right), left and right the halves of X W + bias: a GEGLU layer whole.

X [..., K], W [K, 2D], bias [2D].
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators.record import Operator
from fusion_passes.shapes.facts import Facts, Shape
from fusion_passes.shapes.rules import matmul


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


def shape(node: ir.Node, facts: Facts) -> list[Shape] | None:
    """The shape of the output, or None when it is not known."""
    product = matmul(node, facts)
    return None if product is None else [(*product[0][:-1], product[0][-1] // 2)]


def product(node: ir.Node) -> ir.Node:
    """What a library of products writes to memory on the way."""
    return ir.node("MatMul", node.inputs[:2])


OPERATOR = Operator(
    "LinearSplitGelu",
    shape,
    body,
    inside=product,
)
