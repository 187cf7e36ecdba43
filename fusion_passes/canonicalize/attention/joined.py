"""Keys, or values, of two sources: what is split into heads and joined is joined and split into heads.

    Concat(Transpose(Reshape(a -> [B,S,N,D]), 0213), the same of b; axis 2)
        =>  Transpose(Reshape(Concat(a, b; axis 1) -> [B,S+T,N,D]), 0213)

Attention to a text and to the image itself (diffusers' added projections) is written so. Refused: another axis, heads
that differ in number or size.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from fusion_passes import checks as c
from fusion_passes.pass_ import Case
from fusion_passes.rewriting import unique
from fusion_passes.rule import Rule, rule_pass


class JoinedHeads(Rule):
    """Concat of heads => heads of a Concat"""

    def pattern(self, op: Any, a: Any, b: Any, a4: Any, b4: Any) -> Any:
        first = op.Transpose(op.Reshape(a, a4, _outputs=["a_heads"]), perm=[0, 2, 1, 3])
        second = op.Transpose(op.Reshape(b, b4, _outputs=["b_heads"]), perm=[0, 2, 1, 3])
        return op.Concat(first, second, _outputs=["out"])

    def refuse(
        self, a: ir.Value, b: ir.Value, a_heads: ir.Value, b_heads: ir.Value, out: ir.Value, **_: Any
    ) -> str | None:
        node = out.producer()
        assert node is not None
        if node.attributes["axis"].as_int() not in (2, -2):
            return "the heads are not joined along the sequence"
        for x, heads in ((a, a_heads), (b, b_heads)):
            before, after = c.dims(x) or [], c.dims(heads) or []
            if len(before) != 3 or len(after) != 4 or before[:2] != after[:2]:
                return "a Reshape does not split [B,S,N*D] into heads"
        sizes = [(c.dims(heads) or [])[2:] for heads in (a_heads, b_heads)]
        known = sizes[0] == sizes[1] and all(isinstance(size, int) for size in sizes[0])
        return None if known else "the heads differ in number or size"

    def rewrite(self, op: Any, a: ir.Value, b: ir.Value, a_heads: ir.Value, out: ir.Value, **_: Any) -> Any:
        heads, size = c.size(a_heads, 2) or 0, c.size(a_heads, 3) or 0  # known: `refuse` asked
        shape = op.initializer(ir.tensor([0, 0, heads, size], dtype=ir.DataType.INT64), name=unique(out, "heads"))
        return op.Transpose(op.Reshape(op.Concat(a, b, axis=1), shape), perm=[0, 2, 1, 3])


RULES = (JoinedHeads,)


def _case(
    name: str, fires: int = 1, refused: str | None = None, axis: int = 2, split: str = "0, 0, 2, 4",
    y: str = "B,2,P,4", outputs: str = "", T: int | str = "T",
) -> Case:  # fmt: skip
    graph = f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[B,S,8] a, float[B,{T},8] b) => (float[{y}] y {outputs})
        <int64[4] heads = {{0, 0, 2, 4}}, int64[4] others = {{{split}}}> {{
            a4 = Reshape (a, heads)   at = Transpose <perm = [0, 2, 1, 3]> (a4)
            b4 = Reshape (b, others)  bt = Transpose <perm = [0, 2, 1, 3]> (b4)
            y = Concat <axis = {axis}> (at, bt)
        }}"""
    return Case(name, graph, fires, {"Transpose": 1 if fires else 2}, refused, {"B": 2, "S": 5, "T": 3, "P": 8, "Q": 5})


CASES = [
    _case("two sources"),
    _case("the axis from the end", axis=-2),
    _case("along the heads", 0, "along the sequence", axis=1, y="B,4,S,4", T="S"),
    _case("along the head size", 0, "along the sequence", axis=3, y="B,2,S,8", T="S"),
    _case("the heads are an output", 0, None, outputs=", float[B,2,S,4] at"),
]
PASS = rule_pass("joined_heads", RULES, CASES)
