"""Bfloat16MatMul(X, W, bias?; gated, to) = X W + bias; with gated left * gelu(right) of its two halves (GEGLU).

X [..., K] and W [K, N], each float32 or bfloat16, are rounded to bfloat16, and sums are in float32. bias [N] is
float32. Y has the dtype `to`, float32 or bfloat16.
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators.bfloat16_conv import ROUNDED
from fusion_passes.operators.body_snippets import has
from fusion_passes.operators.definition import FusedOperator
from fusion_passes.shapes.rules import matmul
from fusion_passes.shapes.shape_info import Shape, ShapeInfo


def body(node: ir.Node) -> tuple[str, str]:
    words, statements, last = [], "Z = MatMul (X_rounded, W_rounded)", "Z"
    if has(node, 2):
        words, statements, last = ["bias"], f"{statements}  biased = Add (Z, bias)", "biased"
    if node.attributes.get_int("gated", 0):
        words.append("gated")
        statements += f"""  left, right = Split <axis = -1, num_outputs = 2> ({last})
            gate = Gelu (right)  gated_sum = Mul (left, gate)"""
        last = "gated_sum"
    inputs = "X, W, bias" if has(node, 2) else "X, W"
    return "_".join(words), f"({inputs}) => (Y) {{ {ROUNDED}  {statements}  Y = Cast <to: int = @to> ({last}) }}"


def shape(node: ir.Node, info: ShapeInfo) -> list[Shape] | None:
    shapes = matmul(node, info)
    if not node.attributes.get_int("gated", 0) or shapes is None:
        return shapes
    *rows, columns = shapes[0]
    return [(*rows, columns // 2)]


OPERATOR = FusedOperator("Bfloat16MatMul", shape, body, ("gated", "to"))
