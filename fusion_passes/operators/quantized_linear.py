"""QuantizedLinear(X, W, scale, bias, skip?; gelu, gated): a linear layer of 8-bit elements.

V = (X W^T) scale + bias + skip: X [..., K] and W [N, K] in float8e4m3fn or int8, scale one number or [N] in float32,
bias [N], skip [..., N]. Y is V; with `gelu` GELU of V by tanh, with `gated` left * gelu(right) of the halves of V. Both
exclude a skip.
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators.body_snippets import has
from fusion_passes.operators.definition import FusedOperator
from fusion_passes.shapes.shape_info import Shape, ShapeInfo


def body(node: ir.Node) -> tuple[str, str]:
    skip, gelu, gated = has(node, 4), *(bool(node.attributes.get_int(name, 0)) for name in ("gelu", "gated"))
    overload = "_".join(word for word, used in (("skip", skip), ("gelu", gelu), ("gated", gated)) if used)
    inputs = "X, W, scale, bias, skip" if skip else "X, W, scale, bias"
    end = "Y = Add (sum, skip)" if skip else "Y = Identity (sum)"
    if gelu:
        end = 'Y = Gelu <approximate = "tanh"> (sum)'
    if gated:
        end = "left, right = Split <axis = -1, num_outputs = 2> (sum)  gate = Gelu (right)  Y = Mul (left, gate)"
    return (
        overload,
        f"""({inputs}) => (Y) {{
        x = Cast <to = 1> (X)
        w = Cast <to = 1> (W)
        columns = Transpose <perm = [1, 0]> (w)
        product = MatMul (x, columns)
        scaled = Mul (product, scale)
        values = CastLike (scaled, bias)
        sum = Add (values, bias)
        {end}
    }}""",
    )


def shape(node: ir.Node, info: ShapeInfo) -> list[Shape] | None:
    x, weight = (None if value is None else info.shapes.get(value) for value in node.inputs[:2])
    if x is None or weight is None or len(weight) != 2:
        return None
    return [(*x[:-1], weight[0] // 2 if node.attributes.get_int("gated", 0) else weight[0])]


OPERATOR = FusedOperator(
    "QuantizedLinear", shape, body, ("gelu", "gated"), float32_inputs=(2,), dtype_input=3, float8_output=1
)
