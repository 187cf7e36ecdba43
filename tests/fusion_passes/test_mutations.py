"""Equivalent mutants of graphs are fused as often: 50 mutants (scripts/checks/mutate_exports.py: 2000)."""

from __future__ import annotations

from collections import Counter
from functools import cache

import onnx
import onnx_ir as ir
import pytest

from fusion_passes.canonicalize import canonicalize
from scripts.fixtures import other_architectures
from scripts.fixtures.mutations import fused, mutate

SOURCES = {"bert-dynamo-20": range(20), "clip-text-dynamo-20": range(20, 40), "unet-ddpm-dynamo-20": range(40, 50)}


@cache
def _source(name: str) -> tuple[onnx.ModelProto, Counter[str]]:
    model = other_architectures.load(name)
    return model, fused(ir.from_proto(model))


@pytest.mark.parametrize("name", SOURCES)
def test_equivalent_mutants_are_fused_as_often(name: str) -> None:
    source, expected = _source(name)
    assert expected.total() > 5
    for seed in SOURCES[name]:
        mutant, mutations = mutate(source, seed)
        assert fused(mutant) == expected, (seed, mutations)


def _canonical_ops(body: str) -> list[str]:
    """Return the operator types of a canonicalized graph."""
    model = ir.from_proto(
        onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,4,6] x) => (float z)
        <int64[3] other = {{0, 6, 4}}, int64[1] flat = {{-1}}, int64[3] back = {{-1, 4, 6}}, int64[1] axis = {{0}},
         int64[1] last = {{-1}}, int64[1] end = {{9223372036854775807}}, int64[1] before = {{-99}},
         int64[1] reverse = {{-1}}, float zero = {{0}}, float one = {{1}},
         int64 first = {{0}}, int64 next = {{1}}, int64 previous = {{-1}}, float low = {{-1e30}}, float inf = {{inf}},
         int64[1] width = {{6}}, int64[1] double = {{12}}, int64[1] second = {{1}},
         float[2,1,1] zeros = {{0, 0}}> {{ {body} }}""")
    )
    canonicalize(model)
    return [node.op_type for node in model.graph]


# A mask that masks nothing, since no position is negative, and its Range.
RANGE = "s = Shape (x)  w = Shape <start = 2> (x)  n = Squeeze (w)  r = Range (first, n, next)"
MASK = f"{RANGE}  i = GreaterOrEqual (r, first)  e = Expand (i, s)  m = Where (e, zero, low)  a = Add (x, m)"
JOINED = "r = Sigmoid (x)  j = Concat <axis = 2> (x, r)"
CUT = "s = Shape <end = 1> (x)  a = Slice (x, axis, s, last)  b = Slice (x, s, end, last)"


@pytest.mark.parametrize(
    "body",
    [
        "a = Reshape (x, flat)  b = Reshape (a, back)  z = Relu (b)",
        "a = Unsqueeze (x, axis)  b = Squeeze (a, axis)  z = Relu (b)",
        "a = Transpose <perm = [1, 2, 0]> (x)  b = Transpose <perm = [2, 0, 1]> (a)  z = Relu (b)",
        "a = Cast <to = 11> (x)  b = Cast <to = 1> (a)  z = Relu (b)",
        "a = Add (zero, x)  b = Mul (a, one)  c = Sub (b, zero)  z = Relu (c)",
        "s = Shape <end = 1> (x)  a = Slice (x, axis, s, axis)  z = Relu (a)",
        f"{CUT}  c = Concat <axis = 2> (a, b)  z = Relu (c)",
        "a, b = Split <axis = 2, num_outputs = 2> (x)  c = Concat <axis = -1> (a, b)  z = Relu (c)",
        f"{JOINED}  a = Slice (j, axis, width, last)  z = Relu (a)",
        "s = Shape (x)  o = Expand (one, s)  a = Mul (o, x)  z = Relu (a)",
        f"{MASK}  z = Relu (a)",
        MASK.replace("GreaterOrEqual (r, first)", "Greater (r, previous)") + "  z = Relu (a)",
    ],
)
def test_inverse_pairs_are_removed(body: str) -> None:
    assert _canonical_ops(body) == ["Relu"]


@pytest.mark.parametrize(
    ("body", "stays"),
    [
        ("a = Reshape (x, other)  z = Relu (a)", "Reshape"),
        ("a = Transpose <perm = [1, 2, 0]> (x)  b = Transpose <perm = [1, 2, 0]> (a)  z = Relu (b)", "Transpose"),
        ("a = Cast <to = 10> (x)  b = Cast <to = 1> (a)  z = Relu (b)", "Cast"),
        ("a = Sub (zero, x)  z = Relu (a)", "Sub"),
        ("a = Div (one, x)  z = Relu (a)", "Div"),
        ("a = Add (x, zeros)  z = Relu (a)", "Add"),
        ("s = Shape <start = 1, end = 2> (x)  a = Slice (x, axis, s, axis)  z = Relu (a)", "Slice"),
        ("a = Slice (x, last, before, axis, reverse)  z = Relu (a)", "Slice"),
        (f"{CUT}  c = Concat <axis = 2> (b, a)  z = Relu (c)", "Concat"),
        (f"{CUT}  c = Concat <axis = 2> (a, b, b)  z = Relu (c)", "Concat"),
        (f"{CUT.replace('s, end', 'last, end')}  c = Concat <axis = 2> (a, b)  z = Relu (c)", "Concat"),
        ("a, b = Split <axis = 2, num_outputs = 2> (x)  c = Concat <axis = 2> (b, a)  z = Relu (c)", "Concat"),
        ("a, b = Split <axis = 2, num_outputs = 2> (x)  c = Concat <axis = 1> (a, b)  z = Relu (c)", "Concat"),
        (f"{JOINED}  a = Slice (j, width, double, last)  z = Relu (a)", "Sigmoid"),
        (f"{JOINED}  a = Slice (j, second, double, last)  z = Relu (a)", "Concat"),
        ("s = Shape (x)  o = Expand (one, s)  a = Add (x, o)  z = Relu (a)", "Add"),
        ("a = Mul (x, inf)  b = Mul (a, zero)  c = Add (x, b)  z = Relu (c)", "Add"),
        (MASK.replace("(r, first)", "(r, next)") + "  z = Relu (a)", "Where"),
        (MASK.replace("GreaterOrEqual", "Greater") + "  z = Relu (a)", "Where"),
        (MASK.replace("(first, n", "(previous, n") + "  z = Relu (a)", "Where"),
        (MASK.replace("zero, low", "low, zero") + "  z = Relu (a)", "Add"),
    ],
)
def test_similar_pairs_that_do_not_cancel_stay(body: str, stays: str) -> None:
    assert stays in _canonical_ops(body)
