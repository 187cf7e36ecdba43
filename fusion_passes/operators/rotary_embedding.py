"""RotaryEmbedding(X, position_ids, cos, sin; num_heads, interleaved): rotates the pairs of each head of X [B,S,N*D].

Token s of every image takes row position_ids[0] + s of cos and sin [L,D/2] (Su et al., 2021). A pair is two neighbors
if `interleaved`, else elements i and i + D/2.
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators.body_snippets import same_as_first_input
from fusion_passes.operators.definition import FusedOperator


def body(node: ir.Node) -> tuple[str, str]:
    return (
        "",
        """(X, position_ids, cos, sin) => (Y) {
        length = Shape <start = 1, end = 2> (X)
        end = Add (position_ids, length)
        rows = Constant <value_ints = [0]> ()
        image_cos = Slice (cos, position_ids, end, rows)
        image_sin = Slice (sin, position_ids, end, rows)
        batch = Shape <start = 0, end = 1> (X)
        ones = Constant <value_ints = [1, 1]> ()
        images = Concat <axis = 0> (batch, ones)
        all_cos = Expand (image_cos, images)
        all_sin = Expand (image_sin, images)
        Y = RotaryEmbedding <interleaved: int = @interleaved, num_heads: int = @num_heads> (X, all_cos, all_sin)
    }""",
    )


OPERATOR = FusedOperator("RotaryEmbedding", same_as_first_input, body, ("num_heads", "interleaved"))
