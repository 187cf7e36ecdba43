"""Keys or values from two sources: concatenates before splitting into heads instead of after.

    Concat(Transpose(Reshape(a -> [B,S,N,D]), 0213), the same of b; axis 2)
        =>  Transpose(Reshape(Concat(a, b; axis 1) -> [B,S+T,N,D]), 0213)

diffusers' added projections (attention to a text and to the image itself) have this form. Rejected: another axis, heads
that differ in number or size.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from fusion_passes import value_queries as values
from fusion_passes.graph_edits import unique_name
from fusion_passes.graph_pass import PassCase
from fusion_passes.rule import Rule, rule_pass


class ConcatenatedHeads(Rule):
    """Concat of split heads => split heads of a Concat"""

    def pattern(self, op: Any, a: Any, b: Any, a4: Any, b4: Any) -> Any:
        first = op.Transpose(op.Reshape(a, a4, _outputs=["a_heads"]), perm=[0, 2, 1, 3])
        second = op.Transpose(op.Reshape(b, b4, _outputs=["b_heads"]), perm=[0, 2, 1, 3])
        return op.Concat(first, second, _outputs=["out"])

    def reject_reason(
        self, a: ir.Value, b: ir.Value, a_heads: ir.Value, b_heads: ir.Value, out: ir.Value, **_: Any
    ) -> str | None:
        if values.producer(out).attributes["axis"].as_int() not in (2, -2):
            return "the heads are not concatenated along the sequence"
        for x, heads in ((a, a_heads), (b, b_heads)):
            before, after = values.dims(x) or [], values.dims(heads) or []
            if len(before) != 3 or len(after) != 4 or before[:2] != after[:2]:
                return "a Reshape does not split [B,S,N*D] into heads"
        sizes = [(values.dims(heads) or [])[2:] for heads in (a_heads, b_heads)]
        are_equal = sizes[0] == sizes[1] and all(isinstance(size, int) for size in sizes[0])
        return None if are_equal else "the heads differ in number or size"

    def rewrite(self, op: Any, a: ir.Value, b: ir.Value, a_heads: ir.Value, out: ir.Value, **_: Any) -> Any:
        heads, size = values.size(a_heads, 2) or 0, values.size(a_heads, 3) or 0  # known: see `reject_reason`
        shape = op.initializer(ir.tensor([0, 0, heads, size], dtype=ir.DataType.INT64), name=unique_name(out, "heads"))
        return op.Transpose(op.Reshape(op.Concat(a, b, axis=1), shape), perm=[0, 2, 1, 3])


RULES = (ConcatenatedHeads,)


def _case(
    name: str, rewrites: int = 1, rejection: str | None = None, axis: int = 2, split: str = "0, 0, 2, 4",
    y: str = "B,2,P,4", outputs: str = "", T: int | str = "T",
) -> PassCase:  # fmt: skip
    graph = f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[B,S,8] a, float[B,{T},8] b) => (float[{y}] y {outputs})
        <int64[4] heads = {{0, 0, 2, 4}}, int64[4] others = {{{split}}}> {{
            a4 = Reshape (a, heads)   at = Transpose <perm = [0, 2, 1, 3]> (a4)
            b4 = Reshape (b, others)  bt = Transpose <perm = [0, 2, 1, 3]> (b4)
            y = Concat <axis = {axis}> (at, bt)
        }}"""
    sizes = {"B": 2, "S": 5, "T": 3, "P": 8, "Q": 5}
    return PassCase(name, graph, rewrites, {"Transpose": 1 if rewrites else 2}, rejection, sizes)


CASES = [
    _case("two sources"),
    _case("the axis from the end", axis=-2),
    _case("along the heads", 0, "along the sequence", axis=1, y="B,4,S,4", T="S"),
    _case("along the head size", 0, "along the sequence", axis=3, y="B,2,S,8", T="S"),
    _case("the heads are an output", 0, None, outputs=", float[B,2,S,4] at"),
]
PASS = rule_pass("concatenated_keys", RULES, CASES)
