"""AdaptiveNorm(X, scale, shift?, gate?, skip?; epsilon, rms) -> Y, sum: normalizes sum = gate * X + skip.

Y = LayerNormalization(sum) * scale + shift, or RMSNormalization(sum) * scale + shift if `rms`, over the last axis.
scale, shift and gate are vectors or [B,1,C]; an absent gate is 1.
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators.body_snippets import has
from fusion_passes.operators.definition import FusedOperator
from fusion_passes.shapes.shape_info import Shape, ShapeInfo, input_shape


def body(node: ir.Node) -> tuple[str, str]:
    shift, gate, skip = (has(node, index) for index in (2, 3, 4))
    rms = bool(node.attributes.get_int("rms", 0))
    gated = "gated = Mul (X, gate)" if gate else "gated = Identity (X)"
    total = "sum = Add (gated, skip)" if skip else "sum = Identity (gated)"
    operator = "RMSNormalization" if rms else "LayerNormalization"
    norm = f"normal = {operator} <axis = -1, epsilon: float = @epsilon> (sum, scale)"
    last = "Y = Add (normal, shift)" if shift else "Y = Identity (normal)"
    words = ("rms", rms), ("shift", shift), ("gate", gate), ("skip", skip)
    overload = "_".join(word for word, present in words if present)
    inputs = ("X", "scale", "shift", "gate", "skip")[: len(node.inputs)]
    return overload, f"({', '.join(inputs)}) => (Y, sum) {{ {gated} {total} {norm} {last} }}"


def shapes(node: ir.Node, info: ShapeInfo) -> list[Shape]:
    return [input_shape(node, 0, info)] * len(node.outputs)


OPERATOR = FusedOperator("AdaptiveNorm", shapes, body, ("epsilon", "rms"), float8_output=2)
