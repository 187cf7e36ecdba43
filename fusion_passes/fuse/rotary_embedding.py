"""RotaryEmbedding: fuses the rotation of the pairs of each head by the angles of the token's position.

    x * cos + rotated(x) * sin      tables [S,D]: the cosine and the sine of a pair stand at both of its elements
        rotated = (-x1, x0, -x3, x2, ..)                            interleaved: FLUX
        rotated = (-x[D/2:], x[:D/2])                               halves: language models
    (x0 * cos - x1 * sin, x0 * sin + x1 * cos), ..                  tables [S,D/2]: a complex product in real numbers
    RotaryEmbedding(x [B,N,S,D], cos [B,S,D/2], sin)            of ai.onnx, as exporters write it for opset 23
        =>  RotaryEmbedding(x [B,S,N*D], 0, cos [S,D/2], sin [S,D/2]; num_heads=N, interleaved)

x is [B,S,N,D], or [B,N,S,D] if the tables are [1,1,S,..]; Transposes to tokens and back are inserted for it. The tables
of pairs are followed to the values that repeat. Those of a batch are followed to positions that are the same for each
image, as language models have them: the rows of the first image are read. Rejected: tables in which the elements of a
pair may differ, tables that differ by image or head, heads of unknown number or size. The model's opset becomes 23,
which the operator's body needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import permutations

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from fusion_passes import DOMAIN
from fusion_passes import value_queries as values
from fusion_passes.cleanup import clean_up
from fusion_passes.graph_edits import new_initializer, replace_value, unique_name
from fusion_passes.graph_pass import Pass, PassCase, PassOutcome, Rejection
from fusion_passes.shapes.infer import annotate_new

OPSET = 23
SWAP = [0, 2, 1, 3]


@dataclass(frozen=True)
class Rotation:
    """A rotation of x [B,S,N,D] or [B,N,S,D].

    Attributes:
        doubled: Whether its tables have both elements of a pair.
        standard: Whether its tables are those of ai.onnx, [B,S,D/2] for x [B,N,S,D].
    """

    x: ir.Value
    interleaved: bool
    cos: ir.Value
    sin: ir.Value
    doubled: bool = True
    standard: bool = False


def _producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """Return the node of `op_type` that computes a value, or None."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op_type and not node.domain else None


def _viewed(value: ir.Value | None) -> ir.Value | None:
    """Return the value behind the Reshapes of a value: the same elements in the same order."""
    while node := _producer(value, "Reshape"):
        value = node.inputs[0]
    return value


def _operands(value: ir.Value | None, op_type: str) -> list[tuple[ir.Value, ir.Value]]:
    """Return the operands of a commutative operation that computes a value in both orders, else nothing."""
    node = _producer(value, op_type)
    operands = [] if node is None else [operand for operand in node.inputs if operand is not None]
    return list(permutations(operands, 2))


def _pairs(a: ir.Value | None, b: ir.Value | None) -> tuple[ir.Value, bool] | None:
    """Return (x, interleaved) of a value x whose pairs have the elements `a` and `b`, apart from Reshapes, or None."""
    first, second = _viewed(a), _viewed(b)
    split = _producer(first, "Split")
    if split is None or split.inputs[0] is None or tuple(split.outputs) != (first, second):
        return None
    source, axis = split.inputs[0], split.attributes.get_int("axis", 0)
    if not values.last_axis(axis, source) or values.size(first, -1) != values.size(second, -1):
        return None
    if values.size(source, -1) != 2:
        return (source, False) if a is first and b is second else None
    x = _producer(source, "Reshape")
    if x is None or x.inputs[0] is None:
        return None
    shape, width = values.dims(x.inputs[0]), values.size(x.inputs[0], -1)
    if shape is None or width is None or values.dims(source) != [*shape[:-1], width // 2, 2]:
        return None
    return x.inputs[0], True


def _joins(value: ir.Value, x: ir.Value, interleaved: bool) -> bool:
    """Return whether a value of the shape of x concatenates the two elements of its pairs as x has them."""
    shape, width = values.dims(x), values.size(x, -1)
    concat = _producer(_viewed(value) if interleaved else value, "Concat")
    if concat is None or len(concat.inputs) != 2 or shape is None or width is None or values.dims(value) != shape:
        return False
    part = [*shape[:-1], width // 2, 1] if interleaved else [*shape[:-1], width // 2]
    last = values.last_axis(concat.attributes["axis"].as_int(), concat.inputs[0])
    return last and all(values.dims(each) == part for each in concat.inputs)


def _negated(value: ir.Value | None) -> ir.Value | None:
    """Return v for a value -v, apart from Reshapes, or None."""
    node = _producer(_viewed(value), "Neg")
    return None if node is None else node.inputs[0]


def _match_sum(out: ir.Value) -> Rotation | None:
    """Match x * cos + rotated(x) * sin."""
    for left, right in _operands(out, "Add"):
        for x, cos in _operands(left, "Mul"):
            for rotated, sin in _operands(right, "Mul"):
                concat = _producer(_viewed(rotated), "Concat")
                if concat is None or len(concat.inputs) != 2:
                    continue
                pairs = _pairs(concat.inputs[1], _negated(concat.inputs[0]))
                if pairs is not None and pairs[0] is x and _joins(rotated, *pairs):
                    return Rotation(*pairs, cos, sin)
    return None


def _match_complex(out: ir.Value) -> Rotation | None:
    """Match the pairs (a * cos - b * sin, a * sin + b * cos)."""
    concat = _producer(_viewed(out), "Concat")
    if concat is None or len(concat.inputs) != 2:
        return None
    difference = _producer(_viewed(concat.inputs[0]), "Sub")
    if difference is None:
        return None
    for a, cos in _operands(difference.inputs[0], "Mul"):
        for b, sin in _operands(difference.inputs[1], "Mul"):
            pairs, total = _pairs(a, b), _operands(_viewed(concat.inputs[1]), "Add")
            is_sum = any((a, sin) in _operands(p, "Mul") and (b, cos) in _operands(q, "Mul") for p, q in total)
            if pairs is not None and is_sum and _joins(out, *pairs):
                return Rotation(*pairs, cos, sin, doubled=False)
    return None


def _match_standard(out: ir.Value) -> Rotation | None:
    """Match ai.onnx RotaryEmbedding of all elements of heads [B,N,S,D], with a row of cosines and sines per token."""
    node = _producer(out, "RotaryEmbedding")
    x, cos, sin, ids = (*node.inputs, None)[:4] if node is not None and len(node.inputs) > 2 else (None,) * 4
    if node is None or x is None or cos is None or sin is None or ids is not None or values.rank(x) != 4:
        return None
    if node.attributes.get_int("rotary_embedding_dim", 0) not in (0, values.size(x, 3)):
        return None
    interleaved = bool(node.attributes.get_int("interleaved", 0))
    return Rotation(x, interleaved, cos, sin, doubled=False, standard=True)


def _is_doubled(value: ir.Value | None, interleaved: bool) -> bool:
    """Return whether the elements of each pair of a table [.., D] are equal."""
    node = None if value is None else value.producer()
    if values.is_constant(value):
        table = values.constant(value)
        assert table is not None
        pairs = (table[..., ::2], table[..., 1::2]) if interleaved else np.split(table, 2, axis=-1)
        return np.array_equal(*pairs)
    if value is None or node is None or node.domain:
        return False
    source = node.inputs[0]
    if node.op_type in ("Cast", "Cos", "Sin") or (node.op_type == "Mul" and values.scalar(node.inputs[1]) is not None):
        return _is_doubled(source, interleaved)
    if node.op_type == "Concat":  # of axes of positions, or of the tables of text and image (FLUX.2)
        if interleaved or not values.last_axis(node.attributes["axis"].as_int(), value):
            return all(_is_doubled(part, interleaved) for part in node.inputs)
        return len(node.inputs) == 2 and node.inputs[0] is node.inputs[1]
    if node.op_type != "Reshape":
        return False
    if values.size(source, -1) == values.size(value, -1):
        return _is_doubled(source, interleaved)
    return interleaved and _repeats(source)


def _repeats(value: ir.Value | None) -> bool:
    """Return whether a value [.., 2] has each element of another value twice."""
    expand, concat = _producer(value, "Expand"), _producer(value, "Concat")
    if values.size(value, -1) != 2:
        return False
    if expand is not None:
        return values.size(expand.inputs[0], -1) == 1
    return concat is not None and len(concat.inputs) == 2 and concat.inputs[0] is concat.inputs[1]


def _is_batch_of_one(value: ir.Value | None) -> bool:
    """Return whether a value [B, ..] has the same elements for each image."""
    node, shape = None if value is None else value.producer(), values.dims(value)
    if not shape or shape[0] == 1:
        return bool(shape)
    if node is None or node.domain:
        return False
    if node.op_type in ("Cast", "Cos", "Sin"):
        return _is_batch_of_one(node.inputs[0])
    source = values.dims(node.inputs[0]) if node.inputs else None
    if node.op_type == "Mul":
        return all(values.rank(each) in range(len(shape)) or _is_batch_of_one(each) for each in node.inputs)
    if node.op_type == "Concat":
        axis = node.attributes["axis"].as_int()
        return axis not in (0, -len(shape)) and all(map(_is_batch_of_one, node.inputs))
    if node.op_type == "Expand":
        return source is not None and (len(source) < len(shape) or _is_batch_of_one(node.inputs[0]))
    is_view = node.op_type in ("Reshape", "Unsqueeze") and source is not None and source[:1] == shape[:1]
    return is_view and _is_batch_of_one(node.inputs[0])


def _is_tokens(rotation: Rotation) -> bool | None:
    """Return whether x is [B,S,N,D], or False if it is [B,N,S,D]; None if the tables differ by image or head."""
    x, table = values.dims(rotation.x) or [], values.dims(rotation.cos)
    if len(x) != 4 or table is None or len(table) > 4 or table != values.dims(rotation.sin):
        return None
    if rotation.standard and len(table) == 3:
        table.insert(1, 1)
    table[:0] = [1] * (4 - len(table))
    if table[0] == x[0] and _is_batch_of_one(rotation.cos) and _is_batch_of_one(rotation.sin):
        table[0] = 1
    if table[0] == 1 and table[1] == x[1] and table[2] == 1:
        return True
    return False if table[:3] == [1, 1, x[2]] else None


def _reject_reason(rotation: Rotation) -> str | None:
    x, tokens, pairs = values.dims(rotation.x) or [], _is_tokens(rotation), 1 if rotation.doubled else 2
    if tokens is None:
        return "the tables are not one row of cosines and sines for each token"
    if not all(isinstance(x[axis], int) for axis in (2 if tokens else 1, 3)):
        return "the number or the size of the heads is unknown"
    if any(values.size(table, -1) != int(x[3]) // pairs for table in (rotation.cos, rotation.sin)):
        return "the tables are not as wide as the heads"
    if rotation.doubled and not all(_is_doubled(table, rotation.interleaved) for table in (rotation.cos, rotation.sin)):
        return "the elements of a pair may turn by different angles"
    return None


def _rewrite(graph: ir.Graph, node: ir.Node, rotation: Rotation) -> None:
    tape, x, out = Tape(), rotation.x, node.outputs[0]
    tokens, width = _is_tokens(rotation), values.size(x, 3) or 0
    heads = values.size(x, 2 if tokens else 1) or 0

    def integers(*numbers: int) -> ir.Value:
        return new_initializer(graph, unique_name(out, "integers"), numbers)

    def table(angles: ir.Value) -> ir.Value:
        while (view := _producer(angles, "Reshape")) and values.size(view.inputs[0], -1) == values.size(angles, -1):
            assert view.inputs[0] is not None
            angles = view.inputs[0]  # a table [S,D] that was viewed as [1,S,1,D]
        if values.rank(angles) != 2:
            angles = tape.op("Reshape", [angles, integers(-1, width // (1 if rotation.doubled else 2))])
        if not rotation.doubled:
            return angles
        end, step = (width, 2) if rotation.interleaved else (width // 2, 1)
        return tape.op("Slice", [angles, integers(0), integers(end), integers(1), integers(step)])

    if not tokens:
        transpose = _producer(x, "Transpose") if values.perm(x) == SWAP else None
        x = tape.op("Transpose", [x], {"perm": SWAP}) if transpose is None else transpose.inputs[0] or x
    inputs = [tape.op("Reshape", [x, integers(0, 0, -1)]), integers(0), table(rotation.cos), table(rotation.sin)]
    attributes = {"num_heads": heads, "interleaved": int(rotation.interleaved)}
    fused = tape.op("RotaryEmbedding", inputs, attributes, domain=DOMAIN)
    split = tape.op("Reshape", [fused, integers(0, 0, heads, width)])
    if not tokens:
        tape.op("Transpose", [split], {"perm": SWAP})
    *first, last = tape.nodes
    for new in tape.nodes:
        new.metadata_props.update(node.metadata_props)
    graph.insert_before(node, first)
    replace_value(graph, node, last, out)


def rotary_embedding(model: ir.Model) -> PassOutcome:
    """Rewrite the rotations of `model` in place."""
    outcome = PassOutcome()
    for node in list(model.graph):
        match = _MATCHES.get(node.op_type)
        rotation = match(node.outputs[0]) if match and not node.domain else None
        if rotation is None:
            continue
        if reason := _reject_reason(rotation):
            outcome.rejections.append(Rejection(node, reason))
        else:
            _rewrite(model.graph, node, rotation)
            outcome.counts["rotary_embedding"] += 1
    if outcome.counts.total():
        model.graph.opset_imports[""] = max(OPSET, model.graph.opset_imports[""])
        model.graph.opset_imports.setdefault(DOMAIN, 1)
        clean_up(model)
        annotate_new(model.graph)
    return outcome


_MATCHES = {"Add": _match_sum, "Concat": _match_complex, "Reshape": _match_complex,
            "RotaryEmbedding": _match_standard}  # fmt: skip

_ANGLES = """
    l = Constant <value_ints = [0, -1, 1]> ()  pair = Constant <value_ints = [1, 1, 2]> ()
    flat = Constant <value_ints = [0, 4]> ()  rows = Constant <value_ints = [1, -1, 1, 4]> ()
    c = Cos (angles)  c1 = Reshape (c, l)  c2 = Expand (c1, pair)  c4 = Reshape (c2, flat)  cos = Reshape (c4, rows)
    s = Sin (angles)  s1 = Reshape (s, l)  s2 = Concat <axis = 2> (s1, s1)  s4 = Reshape (s2, flat)
    sin = Reshape (s4, rows)
"""
_HALF_ANGLES = """
    twice = Concat <axis = 1> (angles, angles)  c = Cos (twice)  s = Sin (twice)
    rows = Constant <value_ints = [1, 1, -1, 4]> ()  cos = Reshape (c, rows)  sin = Reshape (s, rows)
"""
_BATCH_ANGLES = """
    zero = Constant <value_int = 0> ()  one = Constant <value_int = 1> ()  n = Shape <start = 1, end = 2> (x)
    first = Constant <value_ints = [0]> ()  length = Squeeze (n, first)  tokens = Range (zero, length, one)
    batch = Shape <start = 0, end = 1> (x)  all = Concat <axis = 0> (batch, n)  row = Unsqueeze (tokens, first)
    ids = Expand (row, all)  end = Constant <value_ints = [-1]> ()  rows = Unsqueeze (ids, end)
    numbers = Cast <to = 1> (rows)  a2 = Mul (numbers, frequencies)  twice = Concat <axis = -1> (a2, a2)
    c = Cos (twice)  s = Sin (twice)  middle = Constant <value_ints = [1]> ()
    cos = Unsqueeze (c, middle)  sin = Unsqueeze (s, middle)
"""
_STANDARD = (
    _BATCH_ANGLES.partition("twice =")[0]
    + """
    cos = Cos (a2)  sin = Sin (a2)  h = Transpose <perm = [0, 2, 1, 3]> (x)
    r = RotaryEmbedding (h, cos, sin)  y = Transpose <perm = [0, 2, 1, 3]> (r)
"""
)
_NEIGHBORS = """
    split = Constant <value_ints = [0, 0, 3, 2, 2]> ()  last = Constant <value_ints = [-1]> ()
    pairs = Reshape (x, split)
    a1, b1 = Split <axis = -1, num_outputs = 2> (pairs)  a = Squeeze (a1, last)  b = Squeeze (b1, last)
"""
_INTERLEAVED = f"""{_NEIGHBORS}
    minus = Neg (b)  m1 = Unsqueeze (minus, last)  a2 = Unsqueeze (a, last)  joined = Concat <axis = -1> (m1, a2)
    whole = Constant <value_ints = [0, 0, 3, 4]> ()  rotated = Reshape (joined, whole)
"""
_HALVES = """
    h = Transpose <perm = [0, 2, 1, 3]> (x)  a, b = Split <axis = 3, num_outputs = 2> (h)  minus = Neg (b)
    rotated = Concat <axis = 3> (minus, a)
"""
_SUM = "p = Mul (x, cos)  q = Mul (rotated, sin)  y = Add (p, q)"
_HEADS_SUM = "p = Mul (h, cos)  q = Mul (rotated, sin)  r = Add (q, p)  y = Transpose <perm = [0, 2, 1, 3]> (r)"
_COMPLEX_HALVES = """
    a, b = Split <axis = 3, num_outputs = 2> (x)  rows = Constant <value_ints = [1, -1, 1, 2]> ()
    cos = Reshape (angles, rows)  ac = Mul (a, cos)  bs = Mul (b, cos)  real = Sub (ac, bs)  as = Mul (a, cos)
    bc = Mul (b, cos)  imaginary = Add (as, bc)  y = Concat <axis = 3> (real, imaginary)
"""
_COMPLEX = f"""{_NEIGHBORS}
    rows = Constant <value_ints = [1, -1, 1, 2]> ()
    c = Cos (angles)  cos = Reshape (c, rows)  s = Sin (angles)  sin = Reshape (s, rows)
    ac = Mul (a, cos)  bs = Mul (b, sin)  real = Sub (ac, bs)  as = Mul (sin, a)  bc = Mul (b, cos)
    imaginary = Add (bc, as)  r1 = Unsqueeze (real, last)  i1 = Unsqueeze (imaginary, last)
    z = Concat <axis = -1> (r1, i1)  whole = Constant <value_ints = [0, 0, 3, 4]> ()  y = Reshape (z, whole)
"""


_TABLES = "cos = Identity (table)  sin = Identity (table)"


def _graph(body: str, outputs: str = "", cos: str = "1,S,1,4", length: str = "S", heads: str = "3") -> str:
    return f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[B,{length},{heads},4] x, float[B,{length},3,4] other, float[{length},2] angles, float[{cos}] sin_in)
            => (float[B,{length},{heads},4] y {outputs})
        <float[2] frequencies = {{1.0, 0.3}},
         float[1,2,1,4] table = {{0.1, 0.1, 0.2, 0.2, 0.3, 0.3, 0.4, 0.4}}> {{ {body} }}"""


_NONE = {"Neg": 0, "Add": 0, "Sub": 0, "Split": 0, "Concat": 0}
_case = partial(PassCase, sizes={"B": 2, "S": 5, "H": 3})
_rejected = partial(_case, rewrites=0, ops={"RotaryEmbedding": 0})
_FLUX = _ANGLES + _INTERLEAVED + _SUM
_JOINED = (
    _FLUX.replace("(c4, rows)", "(c6, rows)")
    .replace("(s4, rows)", "(s6, rows)")
    .replace("cos = Reshape", "c6 = Concat <axis = 0> (c4, c4)  cos = Reshape")
    .replace("sin = Reshape", "s6 = Concat <axis = 0> (s4, s4)  sin = Reshape")
)
_GIVEN = "cos = Identity (sin_in)  sin = Identity (sin_in)"
CASES = [
    _case("FLUX: neighbors", _graph(_FLUX), ops={"RotaryEmbedding": 1, **_NONE, "Concat": 1}),
    _case("a constant table", _graph(_TABLES + _INTERLEAVED + _SUM, length="2"), ops={"RotaryEmbedding": 1, **_NONE}),
    _case(
        "language models: halves, heads before tokens, another order",
        _graph(_HALF_ANGLES + _HALVES + _HEADS_SUM),
        ops={"RotaryEmbedding": 1, **_NONE, "Concat": 1, "Transpose": 2},
    ),
    _case(
        "FLUX.2: tables of text and image, joined",
        _graph(_JOINED, length="6").replace("[6,2] angles", "[3,2] angles"),
        ops={"RotaryEmbedding": 1, **_NONE, "Concat": 3},
    ),
    _rejected(
        "tables joined, one of them of unknown values",
        _graph(_JOINED.replace("(s4, s4)", "(s4, sin_in)"), length="6", cos="3,4").replace(
            "[6,2] angles", "[3,2] angles"
        ),
        rejection="different angles",
    ),
    _case("a complex product", _graph(_COMPLEX), ops={"RotaryEmbedding": 1, **_NONE}),
    _case("halves as a complex product", _graph(_COMPLEX_HALVES), ops={"RotaryEmbedding": 1, **_NONE}),
    _case(
        "language models: a row of positions for each image",
        _graph(_BATCH_ANGLES + _HALVES + _HEADS_SUM),
        ops={"RotaryEmbedding": 1, "Neg": 0, "Split": 0, "Add": 0},
    ),
    _rejected(
        "positions that differ by image",
        _graph(
            _BATCH_ANGLES.replace("Unsqueeze (ids, end)", "Unsqueeze (moved, end)").replace(
                "end = Constant", "b3 = Mul (ids, batches)  moved = Add (ids, b3)  end = Constant"
            )
            + _HALVES
            + _HEADS_SUM
        ).replace("<float[2] freq", "<int64[2,1] batches = {1, 2}, float[2] freq"),
        rejection="row of cosines",
    ),
    _case(
        "ai.onnx RotaryEmbedding",
        _graph(_STANDARD).replace(": 21", ": 23"),
        ops={"RotaryEmbedding": 1, "Transpose": 2, "Reshape": 4},
    ),
    _rejected(
        "ai.onnx RotaryEmbedding of tables for each image",
        _graph(_STANDARD.replace("(h, cos, sin)", "(h, sin_in, sin_in)"), cos="B,S,2").replace(": 21", ": 23"),
        ops={"RotaryEmbedding": 1},
        rejection="row of cosines",
    ),
    _rejected(
        "ai.onnx RotaryEmbedding of a part of each head",
        _graph(
            _STANDARD.replace(
                "RotaryEmbedding (h", "RotaryEmbedding <rotary_embedding_dim = 2, num_heads = 3> (h"
            ).replace("cos = Cos (a2)  sin = Sin (a2)", "cos = Cos (numbers)  sin = Sin (numbers)")
        ).replace(": 21", ": 23"),
        ops={"RotaryEmbedding": 1},
    ),
    _case("rotated values are an output", _graph(_FLUX, ", float[B,S,3,4] rotated"), ops={"RotaryEmbedding": 1}),
    _rejected(
        "angles of halves for neighbors",
        _graph(_HALF_ANGLES.replace("1, 1, -1, 4", "1, -1, 1, 4") + _INTERLEAVED + _SUM),
        rejection="different angles",
    ),
    _rejected(
        "angles of neighbors for halves",
        _graph(_ANGLES.replace("1, -1, 1, 4", "1, 1, -1, 4") + _HALVES + _HEADS_SUM),
        rejection="different angles",
    ),
    _rejected("a table of unknown values", _graph(_GIVEN + _INTERLEAVED + _SUM), rejection="different angles"),
    _rejected(
        "a table for each image", _graph(_GIVEN + _INTERLEAVED + _SUM, cos="B,S,1,4"), rejection="row of cosines"
    ),
    _rejected("a table for each head", _graph(_GIVEN + _INTERLEAVED + _SUM, cos="1,S,3,4"), rejection="row of cosines"),
    _rejected("one angle for all pairs", _graph(_GIVEN + _INTERLEAVED + _SUM, cos="1,S,1,1"), rejection="as wide"),
    _rejected(
        "heads of unknown number",
        _graph(_FLUX.replace("0, 0, 3, 2, 2", "0, 0, -1, 2, 2").replace("0, 0, 3, 4", "0, 0, -1, 4"), heads="H"),
        rejection="number or the size",
    ),
    _rejected("turned backwards", _graph(_FLUX.replace("Neg (b)", "Neg (a)").replace("(a, last)", "(b, last)"))),
    _rejected("not turned", _graph(_FLUX.replace("(m1, a2)", "(a2, m1)"))),
    _rejected("another tensor is turned", _graph(_FLUX.replace("p = Mul (x, cos)", "p = Mul (other, cos)"))),
    _rejected("a conjugate product", _graph(_COMPLEX.replace("Sub (ac, bs)", "Add (ac, bs)"))),
    _rejected("sines swapped", _graph(_COMPLEX.replace("as = Mul (sin, a)", "as = Mul (cos, a)"))),
]

PASS = Pass("rotary_embedding", rotary_embedding, CASES)
