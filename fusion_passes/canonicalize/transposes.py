"""Transposes: one spelling, as few as possible.

    Transpose(Transpose(x, p), q)                                    =>  Transpose(x, p[q]), or x
    Reshape(Transpose(Reshape(x: BHSD -> [B*H,S,D]), 021) -> BHDS)    =>  Transpose(x, 0132)
    Transpose(Reshape(x: BCHW -> [B,C,HW]), 021)                      =>  Reshape(Transpose(x, 0231) -> [B,HW,C])
    Reshape(Transpose(x: [B,HW,C], 021) -> BCHW)                      =>  Transpose(Reshape(x -> BHWC), 0312)

The last two turn the two ways to flatten an image for a transformer into one, where NHWC makes the Transpose vanish.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from fusion_passes import checks as c
from fusion_passes.pass_ import Case
from fusion_passes.rewriting import unique
from fusion_passes.rule import Rule, rule_pass


class MergeTransposes(Rule):
    """Transpose(Transpose(x)) => Transpose(x)"""

    def pattern(self, op: Any, x: Any) -> Any:
        return op.Transpose(op.Transpose(x, _outputs=["inner"]), _outputs=["outer"])

    def refuse(self, inner: ir.Value, outer: ir.Value, **_: Any) -> str | None:
        return None if c.perm(inner) and c.perm(outer) else "the rank of a Transpose without perm is unknown"

    def rewrite(self, op: Any, x: ir.Value, inner: ir.Value, outer: ir.Value) -> Any:
        first, second = c.perm(inner) or [], c.perm(outer) or []
        merged = [first[axis] for axis in second]
        return op.Identity(x) if merged == sorted(merged) else op.Transpose(x, perm=merged)


class BatchedTranspose(Rule):
    """Reshape(Transpose(Reshape(x), 021)) over [B*H,S,D] => Transpose(x, 0132)"""

    def pattern(self, op: Any, x: Any, flat_shape: Any, shape: Any) -> Any:
        flat = op.Reshape(x, flat_shape, _outputs=["flat"])
        return op.Reshape(op.Transpose(flat, perm=[0, 2, 1]), shape, _outputs=["out"])

    def refuse(self, x: ir.Value, flat: ir.Value, out: ir.Value, **_: Any) -> str | None:
        before, middle, after = c.dims(x), c.dims(flat), c.dims(out)
        if before is None or middle is None or after is None or len(before) != 4 or len(middle) != 3:
            return "not a [B,H,S,D] tensor seen as [B*H,S,D]"
        if middle[1:] != before[2:] or after != [*before[:2], before[3], before[2]]:
            return "the Reshapes do not restore the batch and head axes"
        return None

    def rewrite(self, op: Any, x: ir.Value, **_: Any) -> Any:
        return op.Transpose(x, perm=[0, 1, 3, 2])


class FlattenSpatial(Rule):
    """Transpose(Reshape(x: BCHW -> [B,C,HW]), 021) => Reshape(Transpose(x, 0231) -> [B,HW,C])"""

    def pattern(self, op: Any, x: Any, shape: Any) -> Any:
        return op.Transpose(op.Reshape(x, shape, _outputs=["flat"]), perm=[0, 2, 1])

    def refuse(self, x: ir.Value, flat: ir.Value, **_: Any) -> str | None:
        before, after = c.dims(x), c.dims(flat)
        if before is None or after is None or len(before) != 4 or len(after) != 3 or before[:2] != after[:2]:
            return "the Reshape does not flatten the two spatial axes"
        if c.perm(x) == [0, 2, 1, 3]:
            return "it merges heads, and flattens no image"
        return None if isinstance(before[1], int) else "the number of channels is unknown"

    def rewrite(self, op: Any, x: ir.Value, flat: ir.Value, **_: Any) -> Any:
        channels = c.size(x, 1)
        assert channels is not None
        shape = op.initializer(ir.tensor([0, -1, channels], dtype=ir.DataType.INT64), name=unique(flat, "nhwc"))
        return op.Reshape(op.Transpose(x, perm=[0, 2, 3, 1]), shape)


class UnflattenSpatial(Rule):
    """Reshape(Transpose(x: [B,HW,C], 021) -> Shape(like)) => Transpose(Reshape(x -> Shape(like NHWC)), 0312)"""

    def pattern(self, op: Any, x: Any, shape: Any) -> Any:
        return op.Reshape(op.Transpose(x, perm=[0, 2, 1]), shape, _outputs=["out"])

    def refuse(self, x: ir.Value, shape: ir.Value, out: ir.Value, **_: Any) -> str | None:
        before, after, source = c.dims(x), c.dims(out), shape.producer()  # other Reshapes may read the same Shape
        if before is None or after is None or len(before) != 3 or len(after) != 4 or before[2] != after[1]:
            return "the Reshape does not restore two spatial axes"
        if before[0] != after[0]:
            return "the batch may be another behind the Reshape"
        if source is not None and source.op_type == "Shape" and c.same_shape(out, source.inputs[0]):
            return None
        if any(reader.op_type == "Transpose" for reader in c.users(out)):
            return "what it makes is transposed again: heads, and no image"
        known = c.is_constant(shape) and isinstance(after[1], int)
        return None if known else "the shape is not that of the tensor it is taken from"

    def rewrite(self, op: Any, x: ir.Value, shape: ir.Value, out: ir.Value, **_: Any) -> Any:
        source = shape.producer()
        if source is not None and source.op_type == "Shape":
            target = op.Shape(op.Transpose(source.inputs[0], perm=[0, 2, 3, 1]))
        else:
            channels, *sides = (c.ints(shape) or [])[1:]
            channels = channels if channels > 0 else c.size(out, 1) or 1
            target = op.initializer(ir.tensor([0, *sides, channels], dtype=ir.DataType.INT64), name=unique(out, "nhwc"))
        return op.Transpose(op.Reshape(x, target), perm=[0, 3, 1, 2])


RULES = (MergeTransposes, BatchedTranspose, FlattenSpatial, UnflattenSpatial)

_HEADER = '<ir_version: 10, opset_import: ["" : 21]>\n'
CASES = [
    Case(
        "batched transpose of keys",
        _HEADER
        + """g (float[B,4,S,8] x) => (float[B,4,8,S] y) <int64[3] flat = {-1, 0, 8}> {
            s = Shape <start = 2, end = 3> (x)
            m1 = Constant <value = int64[1] {-1}> ()
            d = Constant <value = int64[1] {8}> ()
            h = Constant <value = int64[2] {0, 4}> ()
            three = Concat <axis = 0> (m1, s, d)
            b = Shape <start = 0, end = 2> (x)
            four = Concat <axis = 0> (b, d, s)
            a = Reshape (x, three)
            t = Transpose <perm = [0, 2, 1]> (a)
            y = Reshape (t, four)
        }""",
        ops={"Transpose": 1, "Reshape": 0, "Shape": 0},
        sizes={"B": 2, "S": 5},
    ),
    Case(
        "axes that are no heads",
        _HEADER
        + """g (float[B,4,6,8] x) => (float[B,4,8,6] y) <int64[3] three = {0, 24, 8}, int64[4] four = {0, 4, 8, 6}> {
            a = Reshape (x, three)
            t = Transpose <perm = [0, 2, 1]> (a)
            y = Reshape (t, four)
        }""",
        fires=0,
        refused="do not restore",
        sizes={"B": 2},
    ),
    Case(
        "VAE attention's flattening",
        _HEADER
        + """g (float[B,8,H,W] x) => (float[B,L,8] y) <int64[3] flat = {0, 8, -1}> {
            a = Reshape (x, flat)
            y = Transpose <perm = [0, 2, 1]> (a)
        }""",
        ops={"Transpose": 1, "Reshape": 1},
        sizes={"B": 2, "H": 3, "W": 5, "L": 15},
    ),
    Case(
        "a Reshape that moves channels",
        _HEADER
        + """g (float[B,8,H,W] x) => (float[B,L,4] y) <int64[3] flat = {0, 4, -1}> {
            a = Reshape (x, flat)
            y = Transpose <perm = [0, 2, 1]> (a)
        }""",
        fires=0,
        refused="does not flatten",
        sizes={"B": 2, "H": 3, "W": 5, "L": 30},
    ),
    Case(
        "spatial axes restored twice by one Shape",
        _HEADER
        + """g (float[B,8,H,W] like, float[B,L,8] x, float[B,L,8] z) => (float[B,8,H,W] y, float[B,8,H,W] w) {
            s = Shape (like)
            a = Transpose <perm = [0, 2, 1]> (x)   y = Reshape (a, s)
            b = Transpose <perm = [0, 2, 1]> (z)   w = Reshape (b, s)
        }""",
        fires=2,
        ops={"Reshape": 2},
        sizes={"B": 2, "H": 3, "W": 5, "L": 15},
    ),
    Case(
        "spatial axes of a size of their own",
        _HEADER
        + """g (float[B,L,8] x) => (float[B,8,3,W] y) <int64[4] s = {0, 8, 3, -1}> {
            a = Transpose <perm = [0, 2, 1]> (x)
            y = Reshape (a, s)
        }""",
        ops={"Transpose": 1, "Reshape": 1},
        sizes={"B": 2, "L": 15, "W": 5},
    ),
    Case(
        "spatial axes and a share of the channels",
        _HEADER
        + """g (float[B,L,8] x) => (float[B,4,6,W] y) <int64[4] s = {0, 4, 6, -1}> {
            a = Transpose <perm = [0, 2, 1]> (x)
            y = Reshape (a, s)
        }""",
        fires=0,
        refused="does not restore",
        sizes={"B": 2, "L": 15, "W": 5},
    ),
    Case(
        "two permutations",
        _HEADER
        + """g (float[B,8,H,W] x) => (float[B,W,8,H] y) {
            a = Transpose <perm = [0, 2, 3, 1]> (x)
            b = Transpose <perm = [0, 2, 3, 1]> (a)
            y = Relu (b)
        }""",
        ops={"Transpose": 1},
        sizes={"B": 2, "H": 3, "W": 5},
    ),
]

PASS = rule_pass("transposes", RULES, CASES)
