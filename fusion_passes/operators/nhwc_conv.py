"""NhwcConv(X, W, B?, skip?; relu): Conv of X [N,H,W,C] with W [M,kH,kW,C/group] + skip, with `relu` Relu of the sum."""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators.body_snippets import has
from fusion_passes.operators.definition import FusedOperator, never
from fusion_passes.shapes.dims import constant
from fusion_passes.shapes.shape_info import Shape, ShapeInfo, input_shape


def body(node: ir.Node) -> tuple[str, str]:
    bias, skip, relu = has(node, 2), has(node, 3), bool(node.attributes.get_int("relu", 0))
    operand, types = ", B" if bias else "", {"group": "int", "auto_pad": "string"}
    names = sorted(node.attributes.keys() - {"relu"})
    attributes = ", ".join(f"{name}: {types.get(name, 'ints')} = @{name}" for name in names)
    inputs = "X, W, B, skip" if skip else f"X, W{operand}"
    return (
        "_".join(word for word, used in (("bias", bias), ("skip", skip), ("relu", relu)) if used),
        f"""({inputs}) => (Y) {{
        x_nchw = Transpose <perm = [0, 3, 1, 2]> (X)
        w_nchw = Transpose <perm = [0, 3, 1, 2]> (W)
        y_nchw = Conv <{attributes}> (x_nchw, w_nchw{operand})
        product = Transpose <perm = [0, 2, 3, 1]> (y_nchw)
        total = {"Add (product, skip)" if skip else "Identity (product)"}
        Y = {"Relu" if relu else "Identity"} (total)
    }}""",
    )


def shape(node: ir.Node, info: ShapeInfo) -> list[Shape] | None:
    x, weight = input_shape(node, 0, info), info.shapes.get(node.inputs[1]) if node.inputs[1] else None
    if weight is None or len(x) != 4:
        return None
    kernel, strides = node.attributes.get_ints("kernel_shape"), node.attributes.get_ints("strides") or [1, 1]
    pads, dilations = node.attributes.get_ints("pads") or [0] * 4, node.attributes.get_ints("dilations") or [1, 1]
    kernel = kernel or [d.value or 1 for d in weight[1:3]]
    extra = [pads[i] + pads[i + 2] - dilations[i] * (kernel[i] - 1) - 1 for i in range(2)]
    return [(x[0], *((x[1 + i] + constant(extra[i])) // strides[i] + constant(1) for i in range(2)), weight[0])]


OPERATOR = FusedOperator(
    "NhwcConv",
    shape,
    body,
    ("auto_pad", "dilations", "group", "kernel_shape", "pads", "relu", "strides"),
    has_cpu_kernel=never,
)
