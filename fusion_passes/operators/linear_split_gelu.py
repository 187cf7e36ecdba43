"""LinearSplitGelu(X, W, bias) = left * gelu(right), left and right the halves of X W + bias: a complete GEGLU layer.

X [..., K], W [K, 2D], bias [2D].
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators.definition import FusedOperator
from fusion_passes.shapes.rules import matmul
from fusion_passes.shapes.shape_info import Shape, ShapeInfo


def body(node: ir.Node) -> tuple[str, str]:
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


def shape(node: ir.Node, info: ShapeInfo) -> list[Shape] | None:
    product = matmul(node, info)
    return None if product is None else [(*product[0][:-1], product[0][-1] // 2)]


def internal_matmul(node: ir.Node) -> ir.Node:
    """Return the MatMul whose output a GEMM library writes to memory before the activation."""
    return ir.node("MatMul", node.inputs[:2])


OPERATOR = FusedOperator("LinearSplitGelu", shape, body, internal_node=internal_matmul)
