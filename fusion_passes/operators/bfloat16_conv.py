"""Bfloat16Conv(X, W, B?): Conv of X [N,C,H,W], float32, with filters W [M,C,3,3] (pads 1) or [M,C,1,1]; stride.

X and W, which is float32 or bfloat16, are rounded to bfloat16 and summed in float32."""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators.parts import has
from fusion_passes.operators.record import Operator
from fusion_passes.operators.winograd_conv import shape as same_size
from fusion_passes.shapes.dims import constant
from fusion_passes.shapes.facts import Facts, Shape

ROUNDED = """x = Cast <to = 16> (X)  X_rounded = Cast <to = 1> (x)
    w = Cast <to = 16> (W)  W_rounded = Cast <to = 1> (w)"""


def body(node: ir.Node) -> tuple[str, str]:
    """Its form and its meaning in standard ONNX."""
    bias = has(node, 2)
    named, last = (", B", "B") if bias else ("", "")
    size = None if node.inputs[1] is None or node.inputs[1].shape is None else node.inputs[1].shape[-1]
    stride = node.attributes.get_int("stride", 1)
    pad = 0 if size == 1 else 1
    pads = f"<pads = [{pad}, {pad}, {pad}, {pad}], strides = [{stride}, {stride}]> "
    form = ("pixel" if size == 1 else "square") + ("_bias" if bias else "") + (f"_stride{stride}" if stride > 1 else "")
    return (
        form,
        f"(X, W{named}) => (Y) {{ {ROUNDED}  Y = Conv {pads}(X_rounded, W_rounded{', ' + last if last else ''}) }}",
    )


def shape(node: ir.Node, facts: Facts) -> list[Shape] | None:
    """The shape of the output, or None when it is not known."""
    shapes = same_size(node, facts)
    if shapes is None or node.attributes.get_int("stride", 1) == 1:
        return shapes
    n, m, *edges = shapes[0]
    return [(n, m, *((edge - constant(1)) // 2 + constant(1) for edge in edges))]


OPERATOR = Operator(
    "Bfloat16Conv",
    shape,
    body,
    ("stride",),
)
