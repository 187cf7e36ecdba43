"""SubpixelShuffle(X, bias?): interleaves four phases X [N,H+1,W+1,4*C] to [N,2*H,2*W,C] and adds bias [C].

Y[2i+p, 2j+q] = X[i+p, j+q, phase 2p+q]: DepthToSpace in which each phase has its own offset.
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators.body_snippets import has
from fusion_passes.operators.definition import FusedOperator
from fusion_passes.shapes.dims import constant
from fusion_passes.shapes.shape_info import Shape, ShapeInfo, input_shape


def body(node: ir.Node) -> tuple[str, str]:
    """Return the overload name and the function body in ONNX text: Slice, Concat, DepthToSpace."""
    bias = has(node, 1)
    end = "Y = Add (image, bias)" if bias else "Y = Identity (image)"
    return (
        "bias" if bias else "",
        f"""(X{", bias" if bias else ""}) => (Y) {{
        axes = Constant <value_ints = [1, 2]> ()
        even_even, even_odd, odd_even, odd_odd = Split <axis = 3, num_outputs = 4> (X)
        first = Constant <value_ints = [0, 0]> ()
        right = Constant <value_ints = [0, 1]> ()
        below = Constant <value_ints = [1, 0]> ()
        both = Constant <value_ints = [1, 1]> ()
        but_last = Constant <value_ints = [-1, -1]> ()
        but_row = Constant <value_ints = [-1, 9223372036854775807]> ()
        but_column = Constant <value_ints = [9223372036854775807, -1]> ()
        all = Constant <value_ints = [9223372036854775807, 9223372036854775807]> ()
        a = Slice (even_even, first, but_last, axes)
        b = Slice (even_odd, right, but_row, axes)
        c = Slice (odd_even, below, but_column, axes)
        d = Slice (odd_odd, both, all, axes)
        phases = Concat <axis = 3> (a, b, c, d)
        channels_first = Transpose <perm = [0, 3, 1, 2]> (phases)
        shuffled = DepthToSpace <blocksize = 2, mode = "DCR"> (channels_first)
        image = Transpose <perm = [0, 2, 3, 1]> (shuffled)
        {end}
    }}""",
    )


def shape(node: ir.Node, info: ShapeInfo) -> list[Shape] | None:
    x, one, two = input_shape(node, 0, info), constant(1), constant(2)
    return [(x[0], (x[1] - one) * two, (x[2] - one) * two, x[3] // 4)] if len(x) == 4 else None


OPERATOR = FusedOperator("SubpixelShuffle", shape, body)
