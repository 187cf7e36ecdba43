"""SwiGlu(gate, up?) = silu(gate) * up; without up, gate has both in the halves of its last axis (Shazeer 2020)."""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators.body_snippets import has
from fusion_passes.operators.definition import FusedOperator
from fusion_passes.shapes.shape_info import Shape, ShapeInfo, input_shape


def body(node: ir.Node) -> tuple[str, str]:
    product = "sigmoid = Sigmoid (left)  silu = Mul (left, sigmoid)  Y = Mul (silu, right)"
    if has(node, 1):
        return "up", f"(gate, up) => (Y) {{ left = Identity (gate)  right = Identity (up)  {product} }}"
    return "", f"(gate) => (Y) {{ left, right = Split <axis = -1, num_outputs = 2> (gate)  {product} }}"


def shape(node: ir.Node, info: ShapeInfo) -> list[Shape]:
    gate = input_shape(node, 0, info)
    return [gate if has(node, 1) else (*gate[:-1], gate[-1] // 2)]


OPERATOR = FusedOperator("SwiGlu", shape, body, float8_output=1)
