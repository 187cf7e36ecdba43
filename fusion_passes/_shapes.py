"""Symbolic shape inference with data propagation, for the operators Stable Diffusion graphs consist of.

`infer(graph)` gives every value a shape in `Dim`s and follows small integer tensors (shape arithmetic) element by
element. ONNX's own inference gives two unrelated unknowns to sizes that are equal, so it cannot prove that a Reshape
restores an earlier shape; here equal sizes are equal expressions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from fusion_passes._dims import Dim, constant, symbol

Shape = tuple[Dim, ...]

SAME_AS_FIRST_INPUT = frozenset(
    "Abs BiasAdd Cast Ceil Celu Clip Cos Dropout Elu Erf Exp FastGelu Floor Gelu GroupNorm GroupNormalization "
    "HardSigmoid HardSwish Identity InstanceNormalization IsInf IsNaN LayerNormalization LeakyRelu Log LogSoftmax Mish "
    "Neg Not PRelu QuickGelu Reciprocal Relu RMSNormalization Round Selu Sigmoid Sign Silu Sin Softmax Softplus "
    "Softsign Sqrt Swish Tanh ThresholdedRelu Trilu".split()
)
BROADCAST = frozenset(
    "Add And Div Equal Greater GreaterOrEqual Less LessOrEqual Max Min Mod Mul Or Pow Sub Where Xor".split()
)
# Other operators whose result is of the type of their first input.
AS_FIRST_INPUT = frozenset(
    "CumSum GatherElements GatherND RandomNormalLike ReduceMin ReduceProd ReduceSumSquare ScaledDotProductAttention "
    "ScatterElements ScatterND Sum Tile Unique".split()
)
LIST_LIMIT = 64  # longest integer tensor followed element by element: shapes, axes and index lists are shorter


@dataclass
class Facts:
    """What is known about a graph's values: shapes, and the elements of integer scalars and vectors."""

    shapes: dict[ir.Value, Shape] = field(default_factory=dict)
    elements: dict[ir.Value, list[Dim]] = field(default_factory=dict)
    multiples: dict[str, int] = field(default_factory=dict)
    joined: list[tuple[Dim, Dim]] = field(default_factory=list)  # by Concat: equal, or the graph fails
    broadcast: list[tuple[Dim, Dim]] = field(default_factory=list)  # by broadcasting: equal, or one of them is 1
    optimistic: bool = False  # take the first of two broadcast sizes, to collect pairs without piling up unknowns

    def static(self, value: ir.Value | None) -> list[int] | None:
        """The integers a value holds, when all of them are known."""
        if value is None or value not in self.elements:
            return None
        numbers = [element.value for element in self.elements[value]]
        return None if any(n is None for n in numbers) else [n for n in numbers if n is not None]


MULTIPLES = "sd_ort.multiples"  # key of graph.meta: what the graph, as it was first seen, forces sizes to be


def infer(graph: ir.Graph) -> Facts:
    """Shapes and integer contents of the values of `graph`; values of unknown rank are left out.

    Concat fails at run time unless all its other axes agree. A U-Net that joins `2*ceil(h/8)` with `ceil(h/4)` thus
    runs only where h is a multiple of 8: sizes that the graph's own Concats force to be multiples are taken as such.
    """
    if MULTIPLES not in graph.meta:
        graph.meta[MULTIPLES] = _forced_multiples(_infer(graph, Facts(optimistic=True)))
    return _infer(graph, Facts(multiples=graph.meta[MULTIPLES]))


def _infer(graph: ir.Graph, facts: Facts) -> Facts:
    for value in [*graph.inputs, *graph.initializers.values()]:
        _declare(value, facts)
    for node in graph:
        for operand in node.inputs:
            if operand is not None and operand not in facts.shapes and operand.const_value is not None:
                _declare(operand, facts)
        _infer_node(node, facts)
    return facts


def _forced_multiples(facts: Facts) -> dict[str, int]:
    """For each unknown size the largest power of two that divides it in every run that the graph survives."""
    pairs = [(a, b, False) for a, b in facts.joined] + [(a, b, True) for a, b in facts.broadcast]
    multiples = {}
    for name in sorted(set().union(*(a.symbols() | b.symbols() for a, b, _ in pairs), set())):
        mine = [pair for pair in pairs if pair[0].symbols() | pair[1].symbols() == {name}]
        allowed = [n for n in range(1, 257) if all(_agree(*pair, {name: n}) for pair in mine)]
        dividing = [m for m in (64, 32, 16, 8, 4, 2) if allowed and all(n % m == 0 for n in allowed)]
        if dividing:
            multiples[name] = dividing[0]
    return multiples


def _agree(a: Dim, b: Dim, may_broadcast: bool, sizes: dict[str, int]) -> bool:
    x, y = a.evaluate(sizes), b.evaluate(sizes)
    return x == y or (may_broadcast and 1 in (x, y))


def annotate(graph: ir.Graph) -> Facts:
    """Infer, and write shapes and element types into the values: equal sizes carry equal names for later rules."""
    _annotate_types(graph)
    facts = infer(graph)
    for value, shape in facts.shapes.items():
        if value.const_value is None and not value.is_graph_input():
            value.shape = ir.Shape([d.value if d.value is not None else str(d) for d in shape])
    return facts


BOOLEAN = frozenset("And Equal Greater GreaterOrEqual IsInf IsNaN Less LessOrEqual Not Or Xor".split())


def _annotate_types(graph: ir.Graph) -> None:
    """Element types of all values: exporters leave some out, and a rule that compares them must not guess."""
    for value in graph.initializers.values():
        if value.const_value is not None:
            value.type = ir.TensorType(value.const_value.dtype)
    for node in graph:
        inputs = [v.dtype for v in node.inputs if v is not None]
        for index, output in enumerate(node.outputs):
            if output.dtype is None:
                dtype = ir.DataType.FLOAT if is_statistic(node, index) else _result_type(node, inputs)
                if dtype is not None:
                    output.dtype = dtype


def is_statistic(node: ir.Node, index: int) -> bool:
    """Whether an output is a normalization's mean or inverse deviation, which are float32 whatever the input is."""
    return index in (1, 2) and node.op_type in ("LayerNormalization", "SkipLayerNormalization")


def _result_type(node: ir.Node, inputs: list[ir.DataType | None]) -> ir.DataType | None:
    if node.op_type in ("Shape", "ArgMax", "Size"):
        return ir.DataType.INT64
    if node.op_type == "Cast":
        return ir.DataType(node.attributes["to"].as_int())
    if node.op_type in BOOLEAN:
        return ir.DataType.BOOL
    if node.op_type == "ConstantOfShape":
        tensor = node.attributes.get_tensor("value")
        return tensor.dtype if tensor is not None else ir.DataType.FLOAT
    if node.op_type == "Where" and len(inputs) > 1:
        return inputs[1]
    as_first = node.op_type in SAME_AS_FIRST_INPUT | BROADCAST | AS_FIRST_INPUT or node.op_type in RULES
    return inputs[0] if inputs and as_first else None


def _declare(value: ir.Value, facts: Facts) -> None:
    tensor = value.const_value
    if tensor is not None:
        facts.shapes[value] = tuple(constant(int(d)) for d in tensor.shape.numpy())
        if (
            tensor.dtype in (ir.DataType.INT64, ir.DataType.INT32)
            and tensor.size <= LIST_LIMIT
            and tensor.shape.rank() < 2
        ):
            facts.elements[value] = [constant(int(n)) for n in tensor.numpy().ravel()]
    elif value.shape is not None:
        names = [d if isinstance(d, int) else d.value for d in value.shape]
        facts.shapes[value] = tuple(
            constant(d) if isinstance(d, int) else _size(d or f"{value.name}_{i}", facts) for i, d in enumerate(names)
        )


def _size(name: str, facts: Facts) -> Dim:
    """The size an axis name stands for: exporters tie axes by writing `height/2`, `height*8` or `8*height`."""
    tied = re.fullmatch(r"(?:(?P<times>\d+)\*)?(?P<symbol>[A-Za-z_]\w*)(?:(?P<by>[*/])(?P<number>\d+))?", name)
    if tied is not None and tied["symbol"] != name:
        whole = _size(tied["symbol"], facts) * constant(int(tied["times"] or 1))
        number = int(tied["number"] or 1)
        return whole // number if tied["by"] == "/" else whole * constant(number)
    multiple = facts.multiples.get(name, 1)
    return symbol(name) if multiple == 1 else symbol(f"({name}/{multiple})") * constant(multiple)


def _infer_node(node: ir.Node, facts: Facts) -> None:
    if node.op_type == "Constant":
        value = node.outputs[0]
        tensor = ir.convenience.get_const_tensor(value)
        if tensor is not None:
            value.const_value = tensor
            _declare(value, facts)
        return
    for output, shape in zip(node.outputs, _shapes(node, facts) or (), strict=False):
        if shape is not None:
            facts.shapes[output] = shape
    elements = ELEMENTS.get(node.op_type)
    known = elements(node, facts) if elements is not None else None
    shape = facts.shapes.get(node.outputs[0])
    # Only scalars and vectors: the elements of a matrix have no one order that Concat and broadcasting would keep.
    if known is None or shape is None or len(shape) > 1 or _product(shape).value != len(known):
        return
    if len(known) <= LIST_LIMIT:
        facts.elements[node.outputs[0]] = known


def _shapes(node: ir.Node, facts: Facts) -> Sequence[Shape | None] | None:
    inputs = [facts.shapes.get(v) if v is not None else None for v in node.inputs]
    if node.op_type in SAME_AS_FIRST_INPUT:
        return [inputs[0]]
    if node.op_type in BROADCAST:
        return None if any(s is None for s in inputs) else [broadcast([s for s in inputs if s is not None], facts)]
    rule = RULES.get(node.op_type)
    if rule is None or not inputs or inputs[0] is None:
        return None
    return rule(node, facts)


def broadcast(shapes: Sequence[Shape], facts: Facts) -> Shape:
    """NumPy broadcasting; where two unknown sizes differ, a size of its own stands for the result."""
    rank = max(len(s) for s in shapes)
    result = []
    for axis in range(rank):
        sizes = [s[axis - rank + len(s)] for s in shapes if axis - rank + len(s) >= 0]
        dims = [d for d in dict.fromkeys(sizes) if d != constant(1)]
        known = [d for d in dims if d.value is not None]
        if not dims:
            result.append(constant(1))
        elif known or len(dims) == 1:
            result.append(known[0] if known else dims[0])
        else:
            facts.broadcast += [(dims[0], d) for d in dims[1:]]
            opaque = symbol("max(" + ", ".join(sorted(map(str, dims))) + ")")
            result.append(dims[0] if facts.optimistic else opaque)
    return tuple(result)


def _shape(node: ir.Node, index: int, facts: Facts) -> Shape:
    value = node.inputs[index]
    assert value is not None
    return facts.shapes[value]


def _product(dims: Sequence[Dim]) -> Dim:
    return math.prod(dims, start=constant(1))


def _axis(axis: int, rank: int) -> int:
    return axis + rank if axis < 0 else axis


# --- operators whose output shape differs from their input's ---------------------------------------------------------


def _conv(node: ir.Node, facts: Facts) -> list[Shape] | None:
    x = _shape(node, 0, facts)
    weight = facts.shapes.get(node.inputs[1]) if node.inputs[1] is not None else None
    if weight is None or node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
        return None
    spatial = len(x) - 2
    kernel = node.attributes.get_ints("kernel_shape") or [d.value or 1 for d in weight[2:]]
    strides = node.attributes.get_ints("strides") or [1] * spatial
    dilations = node.attributes.get_ints("dilations") or [1] * spatial
    pads = node.attributes.get_ints("pads") or [0] * (2 * spatial)
    out = []
    for i in range(spatial):
        reach = pads[i] + pads[i + spatial] - dilations[i] * (kernel[i] - 1) - 1
        out.append((x[2 + i] + constant(reach)) // strides[i] + constant(1))
    return [(x[0], weight[0], *out)]


def _gemm(node: ir.Node, facts: Facts) -> list[Shape] | None:
    a, b = _shape(node, 0, facts), facts.shapes.get(node.inputs[1]) if node.inputs[1] else None
    if b is None:
        return None
    rows = a[1] if node.attributes.get_int("transA", 0) else a[0]
    return [(rows, b[0] if node.attributes.get_int("transB", 0) else b[1])]


def _matmul(node: ir.Node, facts: Facts) -> list[Shape] | None:
    a, b = _shape(node, 0, facts), facts.shapes.get(node.inputs[1]) if node.inputs[1] else None
    if b is None or len(a) < 2 or len(b) < 2:
        return None
    return [(*broadcast([a[:-2], b[:-2]], facts), a[-2], b[-1])]


def _reshape(node: ir.Node, facts: Facts) -> list[Shape] | None:
    x = _shape(node, 0, facts)
    target = facts.elements.get(node.inputs[1]) if node.inputs[1] else None
    if target is None:
        return None
    keep_zero = node.attributes.get_int("allowzero", 0)
    dims = [x[i] if d.value == 0 and not keep_zero and i < len(x) else d for i, d in enumerate(target)]
    if constant(-1) in dims:
        hole = dims.index(constant(-1))
        others = [d for i, d in enumerate(dims) if i != hole]
        dims[hole] = _quotient(list(x), others) or symbol(f"{node.outputs[0].name}_{hole}")
    return [tuple(dims)]


def _quotient(numerator: list[Dim], denominator: list[Dim]) -> Dim | None:
    """product(numerator) / product(denominator), when common factors cancel down to a number or nothing."""
    top, bottom = list(numerator), list(denominator)
    for d in denominator:
        if d in top:
            top.remove(d)
            bottom.remove(d)
    up, down = _product(top), _product(bottom)
    if down.value and all(factor % down.value == 0 for _, factor in up.terms):
        return up // down.value
    if len(up.terms) == 1 and len(down.terms) == 1:
        (atoms, factor), (divisors, divisor) = up.terms[0], down.terms[0]
        left = list(atoms)
        for atom in divisors:
            if atom not in left:
                return None
            left.remove(atom)
        return Dim(((tuple(left), factor // divisor),)) if divisor and factor % divisor == 0 else None
    return None


def _transpose(node: ir.Node, facts: Facts) -> list[Shape]:
    x = _shape(node, 0, facts)
    perm = node.attributes.get_ints("perm") or list(range(len(x)))[::-1]
    return [tuple(x[p] for p in perm)]


def _concat(node: ir.Node, facts: Facts) -> list[Shape] | None:
    shapes = [facts.shapes.get(v) for v in node.inputs if v is not None]
    if any(s is None for s in shapes):
        return None
    known = [s for s in shapes if s is not None]
    axis = _axis(node.attributes["axis"].as_int(), len(known[0]))
    total = sum((s[axis] for s in known[1:]), start=known[0][axis])
    for other in known[1:]:
        facts.joined += [(a, b) for i, (a, b) in enumerate(zip(known[0], other, strict=True)) if i != axis and a != b]
    return [(*known[0][:axis], total, *known[0][axis + 1 :])]


def _split(node: ir.Node, facts: Facts) -> list[Shape]:
    x = _shape(node, 0, facts)
    axis = _axis(node.attributes.get_int("axis", 0), len(x))
    sizes = facts.elements.get(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] else None
    if sizes is None:  # equal parts, but for a smaller last one where the number of parts does not divide the size
        parts = len(node.outputs)
        part = (x[axis] + constant(parts - 1)) // parts
        sizes = [part] * (parts - 1) + [x[axis] - part * constant(parts - 1)]
    return [(*x[:axis], size, *x[axis + 1 :]) for size in sizes]


def _slice(node: ir.Node, facts: Facts) -> list[Shape] | None:
    x = list(_shape(node, 0, facts))
    starts, ends, axes, steps = (_ints(node, i, facts) for i in range(1, 5))
    ends_dims = facts.elements.get(node.inputs[2]) if node.inputs[2] else None
    if starts is None:
        return None
    for i, start in enumerate(starts):
        axis = _axis(axes[i], len(x)) if axes else i
        step = steps[i] if steps else 1
        size = x[axis].value
        if ends is not None and size is not None:
            x[axis] = constant(len(range(size)[start : ends[i] : step]))
        elif start == 0 and step == 1 and ends is not None and ends[i] >= 2**31 - 1:
            pass
        elif start == 0 and step == 1 and ends_dims is not None and ends is None and _is_table(node.inputs[0]):
            x[axis] = ends_dims[i]  # a table of positions, sliced to the length of the sequence, is long enough
        else:
            x[axis] = symbol(f"{node.outputs[0].name}_{axis}")
    return [tuple(x)]


def _is_table(value: ir.Value | None) -> bool:
    return value is not None and value.const_value is not None


def _ints(node: ir.Node, index: int, facts: Facts) -> list[int] | None:
    return facts.static(node.inputs[index]) if len(node.inputs) > index else None


def _gather(node: ir.Node, facts: Facts) -> list[Shape] | None:
    x, indices = _shape(node, 0, facts), facts.shapes.get(node.inputs[1]) if node.inputs[1] else None
    if indices is None:
        return None
    axis = _axis(node.attributes.get_int("axis", 0), len(x))
    return [(*x[:axis], *indices, *x[axis + 1 :])]


def _unsqueeze(node: ir.Node, facts: Facts) -> list[Shape] | None:
    x, axes = _shape(node, 0, facts), _ints(node, 1, facts)
    if axes is None:
        return None
    rank = len(x) + len(axes)
    new = {_axis(a, rank) for a in axes}
    rest = iter(x)
    return [tuple(constant(1) if i in new else next(rest) for i in range(rank))]


def _squeeze(node: ir.Node, facts: Facts) -> list[Shape] | None:
    x = _shape(node, 0, facts)
    axes = _ints(node, 1, facts)
    if axes is None:
        if len(node.inputs) > 1 and node.inputs[1] is not None:
            return None
        axes = [i for i, d in enumerate(x) if d.value == 1]
    gone = {_axis(a, len(x)) for a in axes}
    return [tuple(d for i, d in enumerate(x) if i not in gone)]


def _expand(node: ir.Node, facts: Facts) -> list[Shape] | None:
    target = facts.elements.get(node.inputs[1]) if node.inputs[1] else None
    return None if target is None else [broadcast([_shape(node, 0, facts), tuple(target)], facts)]


def repeats(resize: ir.Node, facts: Facts) -> list[int] | None:
    """How many times larger a Resize makes each axis: whole numbers, or None where they are not, or may not be.

    Sizes that are computed count where they are such multiples of the input's whatever the named sizes are.
    """
    x, sizes = resize.inputs[0], resize.inputs[3] if len(resize.inputs) > 3 else None
    if "axes" in resize.attributes or x is None:
        return None
    times: list[int | None]
    if sizes is not None:
        before, after = facts.shapes.get(x), facts.elements.get(sizes)
        stretches = resize.attributes.get_string("keep_aspect_ratio_policy", "stretch") == "stretch"
        if before is None or after is None or len(before) != len(after) or not stretches:
            return None
        times = [_multiple(large, small) for large, small in zip(after, before, strict=True)]
    else:
        given = resize.inputs[2] if len(resize.inputs) > 2 else None
        scales = ir.convenience.get_const_tensor(given) if given is not None else None
        if scales is None:
            return None
        numbers = [float(scale) for scale in scales.numpy()]
        times = [int(number) if number >= 1 and number.is_integer() else None for number in numbers]
    return None if None in times else [n for n in times if n is not None]


def _multiple(large: Dim, small: Dim) -> int | None:
    """The number that `large` is times `small`, 1 or more, or None."""
    if large == small:
        return 1
    if not large.terms or not small.terms:
        return None
    times = large.terms[0][1] // small.terms[0][1]
    return times if times > 1 and small * constant(times) == large else None


def _resize(node: ir.Node, facts: Facts) -> list[Shape] | None:
    x = _shape(node, 0, facts)
    if "axes" in node.attributes or node.attributes.get_string("keep_aspect_ratio_policy", "stretch") != "stretch":
        return None
    if len(node.inputs) > 3 and node.inputs[3] is not None:
        sizes = facts.elements.get(node.inputs[3])
        return None if sizes is None else [tuple(sizes)]
    scales = ir.convenience.get_const_tensor(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] else None
    if scales is None:
        return None
    factors = [float(s) for s in scales.numpy()]
    if any(f != int(f) for f in factors):
        return None
    return [tuple(d * constant(int(f)) for d, f in zip(x, factors, strict=True))]


def _shape_of(node: ir.Node, facts: Facts) -> list[Shape]:
    return [(constant(len(_shape_elements(node, facts) or [])),)]


def _pad(node: ir.Node, facts: Facts) -> list[Shape] | None:
    x, pads = _shape(node, 0, facts), _ints(node, 1, facts)
    if pads is None or len(pads) != 2 * len(x) or (len(node.inputs) > 3 and node.inputs[3] is not None):
        return None
    return [tuple(d + constant(pads[i] + pads[i + len(x)]) for i, d in enumerate(x))]


def _range(node: ir.Node, facts: Facts) -> list[Shape] | None:
    start, delta = (facts.static(node.inputs[i]) for i in (0, 2))
    limit = facts.elements.get(node.inputs[1]) if node.inputs[1] else None
    if start == [0] and delta == [1] and limit:
        return [(limit[0],)]
    return [(symbol(f"{node.outputs[0].name}_0"),)]


def _reduce(node: ir.Node, facts: Facts) -> list[Shape] | None:
    x = _shape(node, 0, facts)
    axes = _ints(node, 1, facts) or node.attributes.get_ints("axes")
    if axes is None:
        return None
    gone = {_axis(a, len(x)) for a in axes}
    keep = node.attributes.get_int("keepdims", 1)
    return [tuple(constant(1) if i in gone else d for i, d in enumerate(x) if keep or i not in gone)]


def _argmax(node: ir.Node, facts: Facts) -> list[Shape]:
    x = _shape(node, 0, facts)
    axis = _axis(node.attributes.get_int("axis", 0), len(x))
    keep = node.attributes.get_int("keepdims", 1)
    return [tuple(constant(1) if i == axis else d for i, d in enumerate(x) if keep or i != axis)]


def _constant_of_shape(node: ir.Node, facts: Facts) -> list[Shape] | None:
    target = facts.elements.get(node.inputs[0]) if node.inputs[0] else None
    return None if target is None else [tuple(target)]


def _attention(node: ir.Node, facts: Facts) -> list[Shape] | None:
    q = _shape(node, 0, facts)
    v = facts.shapes.get(node.inputs[2]) if node.inputs[2] else None
    if v is None or len(q) != len(v):
        return None
    return [(*q[:-1], v[-1])]


def _sum_and_normal(node: ir.Node, facts: Facts) -> list[Shape | None]:
    """SkipGroupNorm and SkipLayerNormalization: the normalized tensor first, the sum last."""
    x = _shape(node, 0, facts)
    return [x, *[None] * (len(node.outputs) - 2), x]


def _half(node: ir.Node, facts: Facts) -> list[Shape]:
    x = _shape(node, 0, facts)
    return [(*x[:-1], x[-1] // 2)]


def _multi_head(node: ir.Node, facts: Facts) -> list[Shape] | None:
    q = _shape(node, 0, facts)
    value = node.inputs[2] if len(node.inputs) > 2 else None
    v = facts.shapes.get(value) if value is not None else None
    if len(q) == 5:  # packed [B,S,N,3,D]
        return [(q[0], q[1], q[2] * q[4])]
    return [q if v is None else (q[0], q[1], v[2])]


def _nhwc_conv(node: ir.Node, facts: Facts) -> list[Shape] | None:
    x, weight = _shape(node, 0, facts), facts.shapes.get(node.inputs[1]) if node.inputs[1] else None
    if weight is None or len(x) != 4:
        return None
    kernel, strides = node.attributes.get_ints("kernel_shape"), node.attributes.get_ints("strides") or [1, 1]
    pads, dilations = node.attributes.get_ints("pads") or [0] * 4, node.attributes.get_ints("dilations") or [1, 1]
    kernel = kernel or [d.value or 1 for d in weight[1:3]]
    reach = [pads[i] + pads[i + 2] - dilations[i] * (kernel[i] - 1) - 1 for i in range(2)]
    return [(x[0], *((x[1 + i] + constant(reach[i])) // strides[i] + constant(1) for i in range(2)), weight[0])]


def _winograd_conv(node: ir.Node, facts: Facts) -> list[Shape] | None:
    x, weight = _shape(node, 0, facts), facts.shapes.get(node.inputs[1]) if node.inputs[1] else None
    return None if weight is None or len(x) != 4 else [(x[0], weight[0], *x[2:])]


def _upsample_nearest(node: ir.Node, facts: Facts) -> list[Shape] | None:
    x, times = _shape(node, 0, facts), [node.attributes[f"scale_{side}"].as_int() for side in ("height", "width")]
    return [(x[0], x[1] * constant(times[0]), x[2] * constant(times[1]), x[3])] if len(x) == 4 else None


RULES: dict[str, Callable[[ir.Node, Facts], Sequence[Shape | None] | None]] = {
    "ArgMax": _argmax, "Attention": _attention, "BiasSplitGelu": _half, "Concat": _concat,
    "ConstantOfShape": _constant_of_shape, "Conv": _conv, "Expand": _expand, "Gather": _gather, "Gemm": _gemm,
    "LinearAdd": _matmul, "MatMul": _matmul, "MultiHeadAttention": _multi_head, "NhwcConv": _nhwc_conv, "Pad": _pad,
    "Range": _range, "ReduceMax": _reduce, "ReduceMean": _reduce, "ReduceSum": _reduce, "Reshape": _reshape,
    "Resize": _resize, "ScaledDotProductAttention": _attention, "Shape": _shape_of,
    "SkipGroupNorm": _sum_and_normal, "SkipLayerNormalization": _sum_and_normal, "Slice": _slice, "Split": _split,
    "Squeeze": _squeeze, "Transpose": _transpose, "Unsqueeze": _unsqueeze,
    "UpsampleNearest": _upsample_nearest, "WinogradConv": _winograd_conv,
}  # fmt: skip


# --- integer contents ------------------------------------------------------------------------------------------------


def _shape_elements(node: ir.Node, facts: Facts) -> list[Dim] | None:
    shape = facts.shapes.get(node.inputs[0]) if node.inputs[0] else None
    if shape is None:
        return None
    end = node.attributes.get_int("end", len(shape))
    return list(shape[node.attributes.get_int("start", 0) : end])


def _same_elements(node: ir.Node, facts: Facts) -> list[Dim] | None:
    elements = facts.elements.get(node.inputs[0]) if node.inputs[0] else None
    if node.op_type == "Cast" and node.attributes["to"].as_int() not in (ir.DataType.INT64, ir.DataType.INT32):
        return None
    if node.op_type == "Reshape" and elements is not None and len(elements) != 1:
        shape = _reshape(node, facts)
        return elements if shape and len(shape[0]) == 1 else None
    return elements


def _concat_elements(node: ir.Node, facts: Facts) -> list[Dim] | None:
    parts = [facts.elements.get(v) for v in node.inputs if v is not None]
    return None if any(p is None for p in parts) else [d for p in parts if p is not None for d in p]


def _gather_elements(node: ir.Node, facts: Facts) -> list[Dim] | None:
    data = facts.elements.get(node.inputs[0]) if node.inputs[0] else None
    indices = facts.static(node.inputs[1])
    if data is None or indices is None or node.attributes.get_int("axis", 0) != 0:
        return None
    return [data[i] for i in indices] if all(-len(data) <= i < len(data) for i in indices) else None


def _slice_elements(node: ir.Node, facts: Facts) -> list[Dim] | None:
    data = facts.elements.get(node.inputs[0]) if node.inputs[0] else None
    starts, ends, _, steps = (_ints(node, i, facts) for i in range(1, 5))
    if data is None or starts is None or ends is None or len(starts) != 1:
        return None
    return data[starts[0] : ends[0] : steps[0] if steps else 1]


def _arithmetic(node: ir.Node, facts: Facts) -> list[Dim] | None:
    a, b = (facts.elements.get(v) if v is not None else None for v in node.inputs[:2])
    if a is None or b is None or (len(a) != len(b) and 1 not in (len(a), len(b))):
        return None
    size = max(len(a), len(b))
    pairs = zip(a * (size if len(a) == 1 else 1), b * (size if len(b) == 1 else 1), strict=True)
    result = [_combine(node.op_type, x, y) for x, y in pairs]
    return None if any(r is None for r in result) else [r for r in result if r is not None]


def _combine(op_type: str, x: Dim, y: Dim) -> Dim | None:
    match op_type:
        case "Add":
            return x + y
        case "Sub":
            return x - y
        case "Mul":
            return x * y
    # ONNX divides towards zero, as the floor does for what is not negative.
    if y.value and y.value > 0 and (x.at_least or 0) >= 0 and x.at_least is not None:
        return x // y.value
    return _quotient([x], [y])


def _equal(node: ir.Node, facts: Facts) -> list[Dim] | None:
    a, b = (facts.elements.get(v) if v is not None else None for v in node.inputs[:2])
    if a is None or b is None or (len(a) != len(b) and 1 not in (len(a), len(b))):
        return None
    size = max(len(a), len(b))
    pairs = zip(a * (size if len(a) == 1 else 1), b * (size if len(b) == 1 else 1), strict=True)
    result = [_is_equal(x, y) for x, y in pairs]
    return None if any(r is None for r in result) else [constant(int(bool(r))) for r in result]


def _is_equal(x: Dim, y: Dim) -> bool | None:
    """Whether two sizes are equal; exporters ask whether a size is -1, and an unknown size never is."""
    if x == y:
        return True
    if x.value is not None and y.value is not None:
        return False
    low, high = (x, y) if x.value is not None else (y, x)
    if low.value is not None and low.value < 0 and all(factor > 0 for _, factor in high.terms):
        return False
    return None


def _where(node: ir.Node, facts: Facts) -> list[Dim] | None:
    condition = facts.static(node.inputs[0])
    a, b = (facts.elements.get(v) if v is not None else None for v in node.inputs[1:3])
    if condition is None or a is None or b is None or not len(condition) == len(a) == len(b):
        return None
    return [x if c else y for c, x, y in zip(condition, a, b, strict=True)]


def _filled(node: ir.Node, facts: Facts) -> list[Dim] | None:
    size, tensor = facts.static(node.inputs[0]), node.attributes.get_tensor("value")
    if size is None or len(size) != 1 or size[0] > LIST_LIMIT or tensor is None or tensor.dtype != ir.DataType.INT64:
        return None
    return [constant(int(tensor.numpy().ravel()[0]))] * size[0]


ELEMENTS: dict[str, Callable[[ir.Node, Facts], list[Dim] | None]] = {
    "Add": _arithmetic, "Cast": _same_elements, "Concat": _concat_elements, "ConstantOfShape": _filled,
    "Div": _arithmetic, "Equal": _equal, "Gather": _gather_elements, "Identity": _same_elements, "Mul": _arithmetic,
    "Reshape": _same_elements, "Shape": _shape_elements, "Slice": _slice_elements, "Squeeze": _same_elements,
    "Sub": _arithmetic, "Unsqueeze": _same_elements, "Where": _where,
}  # fmt: skip
