"""Transposes: one canonical form with as few Transposes as possible.

    Transpose(Transpose(x, p), q)                                    =>  Transpose(x, p[q]), or x
    Reshape(Transpose(Reshape(x: BHSD -> [B*H,S,D]), 021) -> BHDS)    =>  Transpose(x, 0132)
    Transpose(Reshape(x: BCHW -> [B,C,HW]), 021)                      =>  Reshape(Transpose(x, 0231) -> [B,HW,C])
    Reshape(Transpose(x: [B,HW,C], 021) -> BCHW)                      =>  Transpose(Reshape(x -> BHWC), 0312)

The last two unify the two ways to flatten an image for a transformer. In NHWC their Transpose is removed.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from fusion_passes import value_queries as values
from fusion_passes.graph_edits import unique_name
from fusion_passes.graph_pass import PassCase
from fusion_passes.rule import Rule, rule_pass


class MergeTransposes(Rule):
    """Transpose(Transpose(x)) => Transpose(x)"""

    def pattern(self, op: Any, x: Any) -> Any:
        return op.Transpose(op.Transpose(x, _outputs=["inner"]), _outputs=["outer"])

    def reject_reason(self, inner: ir.Value, outer: ir.Value, **_: Any) -> str | None:
        return None if values.perm(inner) and values.perm(outer) else "the rank of a Transpose without perm is unknown"

    def rewrite(self, op: Any, x: ir.Value, inner: ir.Value, outer: ir.Value) -> Any:
        first, second = values.perm(inner) or [], values.perm(outer) or []
        merged = [first[axis] for axis in second]
        return op.Identity(x) if merged == sorted(merged) else op.Transpose(x, perm=merged)


class BatchedTranspose(Rule):
    """Reshape(Transpose(Reshape(x), 021)) over [B*H,S,D] => Transpose(x, 0132)"""

    def pattern(self, op: Any, x: Any, flat_shape: Any, shape: Any) -> Any:
        flat = op.Reshape(x, flat_shape, _outputs=["flat"])
        return op.Reshape(op.Transpose(flat, perm=[0, 2, 1]), shape, _outputs=["out"])

    def reject_reason(self, x: ir.Value, flat: ir.Value, out: ir.Value, **_: Any) -> str | None:
        before, middle, after = values.dims(x), values.dims(flat), values.dims(out)
        if before is None or middle is None or after is None or len(before) != 4 or len(middle) != 3:
            return "the Reshape is not from [B,H,S,D] to [B*H,S,D]"
        if middle[1:] != before[2:] or after != [*before[:2], before[3], before[2]]:
            return "the Reshapes do not restore the batch and head axes"
        return None

    def rewrite(self, op: Any, x: ir.Value, **_: Any) -> Any:
        return op.Transpose(x, perm=[0, 1, 3, 2])


class FlattenSpatial(Rule):
    """Transpose(Reshape(x: BCHW -> [B,C,HW]), 021) => Reshape(Transpose(x, 0231) -> [B,HW,C])"""

    def pattern(self, op: Any, x: Any, shape: Any) -> Any:
        return op.Transpose(op.Reshape(x, shape, _outputs=["flat"]), perm=[0, 2, 1])

    def reject_reason(self, x: ir.Value, flat: ir.Value, **_: Any) -> str | None:
        before, after = values.dims(x), values.dims(flat)
        if before is None or after is None or len(before) != 4 or len(after) != 3 or before[:2] != after[:2]:
            return "the Reshape does not flatten the two spatial axes"
        if values.perm(x) == [0, 2, 1, 3]:
            return "the Reshape merges heads, it does not flatten an image"
        return None if isinstance(before[1], int) else "the number of channels is unknown"

    def rewrite(self, op: Any, x: ir.Value, flat: ir.Value, **_: Any) -> Any:
        channels = values.static_size(x, 1)
        shape = op.initializer(ir.tensor([0, -1, channels], dtype=ir.DataType.INT64), name=unique_name(flat, "nhwc"))
        return op.Reshape(op.Transpose(x, perm=[0, 2, 3, 1]), shape)


class UnflattenSpatial(Rule):
    """Reshape(Transpose(x: [B,HW,C], 021) -> Shape(like)) => Transpose(Reshape(x -> Shape(like NHWC)), 0312)"""

    def pattern(self, op: Any, x: Any, shape: Any) -> Any:
        return op.Reshape(op.Transpose(x, perm=[0, 2, 1]), shape, _outputs=["out"])

    def reject_reason(self, x: ir.Value, shape: ir.Value, out: ir.Value, **_: Any) -> str | None:
        before, after, source = (
            values.dims(x),
            values.dims(out),
            shape.producer(),
        )  # other Reshapes may use the same Shape
        if before is None or after is None or len(before) != 3 or len(after) != 4 or before[2] != after[1]:
            return "the Reshape does not restore two spatial axes"
        if before[0] != after[0]:
            return "the Reshape may change the batch size"
        if source is not None and source.op_type == "Shape" and values.same_shape(out, source.inputs[0]):
            return None
        if any(consumer.op_type == "Transpose" for consumer in values.consumers(out)):
            return "the result is transposed again: it has heads, it is not an image"
        is_shape_of_x = values.is_constant(shape) and isinstance(after[1], int)
        return None if is_shape_of_x else "the shape is neither constant nor the Shape of an equal tensor"

    def rewrite(self, op: Any, x: ir.Value, shape: ir.Value, out: ir.Value, **_: Any) -> Any:
        source = shape.producer()
        if source is not None and source.op_type == "Shape":
            target = op.Shape(op.Transpose(source.inputs[0], perm=[0, 2, 3, 1]))
        else:
            channels, *sides = (values.ints(shape) or [])[1:]
            channels = channels if channels > 0 else values.size(out, 1) or 1
            target = op.initializer(
                ir.tensor([0, *sides, channels], dtype=ir.DataType.INT64), name=unique_name(out, "nhwc")
            )
        return op.Transpose(op.Reshape(x, target), perm=[0, 3, 1, 2])


RULES = (MergeTransposes, BatchedTranspose, FlattenSpatial, UnflattenSpatial)

_HEADER = '<ir_version: 10, opset_import: ["" : 21]>\n'
CASES = [
    PassCase(
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
    PassCase(
        "axes that are no heads",
        _HEADER
        + """g (float[B,4,6,8] x) => (float[B,4,8,6] y) <int64[3] three = {0, 24, 8}, int64[4] four = {0, 4, 8, 6}> {
            a = Reshape (x, three)
            t = Transpose <perm = [0, 2, 1]> (a)
            y = Reshape (t, four)
        }""",
        rewrites=0,
        rejection="do not restore",
        sizes={"B": 2},
    ),
    PassCase(
        "VAE attention's flattening",
        _HEADER
        + """g (float[B,8,H,W] x) => (float[B,L,8] y) <int64[3] flat = {0, 8, -1}> {
            a = Reshape (x, flat)
            y = Transpose <perm = [0, 2, 1]> (a)
        }""",
        ops={"Transpose": 1, "Reshape": 1},
        sizes={"B": 2, "H": 3, "W": 5, "L": 15},
    ),
    PassCase(
        "a Reshape that moves channels",
        _HEADER
        + """g (float[B,8,H,W] x) => (float[B,L,4] y) <int64[3] flat = {0, 4, -1}> {
            a = Reshape (x, flat)
            y = Transpose <perm = [0, 2, 1]> (a)
        }""",
        rewrites=0,
        rejection="does not flatten",
        sizes={"B": 2, "H": 3, "W": 5, "L": 30},
    ),
    PassCase(
        "spatial axes restored twice by one Shape",
        _HEADER
        + """g (float[B,8,H,W] like, float[B,L,8] x, float[B,L,8] z) => (float[B,8,H,W] y, float[B,8,H,W] w) {
            s = Shape (like)
            a = Transpose <perm = [0, 2, 1]> (x)   y = Reshape (a, s)
            b = Transpose <perm = [0, 2, 1]> (z)   w = Reshape (b, s)
        }""",
        rewrites=2,
        ops={"Reshape": 2},
        sizes={"B": 2, "H": 3, "W": 5, "L": 15},
    ),
    PassCase(
        "spatial axes of a size of their own",
        _HEADER
        + """g (float[B,L,8] x) => (float[B,8,3,W] y) <int64[4] s = {0, 8, 3, -1}> {
            a = Transpose <perm = [0, 2, 1]> (x)
            y = Reshape (a, s)
        }""",
        ops={"Transpose": 1, "Reshape": 1},
        sizes={"B": 2, "L": 15, "W": 5},
    ),
    PassCase(
        "spatial axes and a share of the channels",
        _HEADER
        + """g (float[B,L,8] x) => (float[B,4,6,W] y) <int64[4] s = {0, 4, 6, -1}> {
            a = Transpose <perm = [0, 2, 1]> (x)
            y = Reshape (a, s)
        }""",
        rewrites=0,
        rejection="does not restore",
        sizes={"B": 2, "L": 15, "W": 5},
    ),
    PassCase(
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
