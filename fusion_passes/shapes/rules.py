"""Shape rules: the shape of each operator's outputs, of its inputs' shapes and of the integers that they hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from fusion_passes.shapes.dims import Dim, constant, symbol
from fusion_passes.shapes.facts import Facts, Shape, axis_of, broadcast, ints_of, quotient, shape_of

SAME_AS_FIRST_INPUT = frozenset(
    "Abs Cast Ceil Celu Clip Cos Dropout Elu Erf Exp FastGelu Floor Gelu GroupNormalization "
    "HardSigmoid HardSwish Identity InstanceNormalization IsInf IsNaN LayerNormalization LeakyRelu Log LogSoftmax Mish "
    "Neg Not PRelu Reciprocal Relu RMSNormalization Round Selu Sigmoid Sign Silu Sin Softmax Softplus "
    "Softsign Sqrt Swish Tanh ThresholdedRelu".split()
)
BROADCAST = frozenset(
    "Add And BitShift BitwiseAnd BitwiseOr BitwiseXor Div Equal Greater GreaterOrEqual Less LessOrEqual Max Min Mod "
    "Mul Or Pow Sub Where Xor".split()
)


def _conv(node: ir.Node, facts: Facts) -> list[Shape] | None:
    x = shape_of(node, 0, facts)
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
    a, b = shape_of(node, 0, facts), facts.shapes.get(node.inputs[1]) if node.inputs[1] else None
    if b is None:
        return None
    rows = a[1] if node.attributes.get_int("transA", 0) else a[0]
    return [(rows, b[0] if node.attributes.get_int("transB", 0) else b[1])]


def matmul(node: ir.Node, facts: Facts) -> list[Shape] | None:
    """The shape of a matrix product, batches broadcast."""
    a, b = shape_of(node, 0, facts), facts.shapes.get(node.inputs[1]) if node.inputs[1] else None
    if b is None or len(a) < 2 or len(b) < 2:
        return None
    return [(*broadcast([a[:-2], b[:-2]], facts), a[-2], b[-1])]


def reshape(node: ir.Node, facts: Facts) -> list[Shape] | None:
    """The shape of a Reshape, with a size of its own where -1 stands for an unknown one."""
    x = facts.shapes.get(node.inputs[0]) if node.inputs[0] else None
    target = facts.elements.get(node.inputs[1]) if node.inputs[1] else None
    if target is None:
        return None
    keep_zero = node.attributes.get_int("allowzero", 0)
    if x is None:  # the target says the rank, and every size but those that are taken from the input
        taken = {-1} if keep_zero else {-1, 0}
        return [tuple(symbol(f"{node.outputs[0].name}_{i}") if d.value in taken else d for i, d in enumerate(target))]
    dims = [x[i] if d.value == 0 and not keep_zero and i < len(x) else d for i, d in enumerate(target)]
    if constant(-1) in dims:
        hole = dims.index(constant(-1))
        others = [d for i, d in enumerate(dims) if i != hole]
        dims[hole] = quotient(list(x), others) or symbol(f"{node.outputs[0].name}_{hole}")
    return [tuple(dims)]


def _transpose(node: ir.Node, facts: Facts) -> list[Shape]:
    x = shape_of(node, 0, facts)
    perm = node.attributes.get_ints("perm") or list(range(len(x)))[::-1]
    return [tuple(x[p] for p in perm)]


def _concat(node: ir.Node, facts: Facts) -> list[Shape] | None:
    shapes = [facts.shapes.get(v) for v in node.inputs if v is not None]
    if any(s is None for s in shapes):
        return None
    known = [s for s in shapes if s is not None]
    axis = axis_of(node.attributes["axis"].as_int(), len(known[0]))
    total = sum((s[axis] for s in known[1:]), start=known[0][axis])
    for other in known[1:]:
        facts.joined += [(a, b) for i, (a, b) in enumerate(zip(known[0], other, strict=True)) if i != axis and a != b]
    return [(*known[0][:axis], total, *known[0][axis + 1 :])]


def _split(node: ir.Node, facts: Facts) -> list[Shape]:
    x = shape_of(node, 0, facts)
    axis = axis_of(node.attributes.get_int("axis", 0), len(x))
    sizes = facts.elements.get(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] else None
    if sizes is None:  # equal parts, but for a smaller last one where the number of parts does not divide the size
        parts = len(node.outputs)
        part = (x[axis] + constant(parts - 1)) // parts
        sizes = [part] * (parts - 1) + [x[axis] - part * constant(parts - 1)]
    return [(*x[:axis], size, *x[axis + 1 :]) for size in sizes]


def _slice(node: ir.Node, facts: Facts) -> list[Shape] | None:
    x = list(shape_of(node, 0, facts))
    starts, ends, axes, steps = (ints_of(node, i, facts) for i in range(1, 5))
    ends_dims = facts.elements.get(node.inputs[2]) if node.inputs[2] else None
    if starts is None:
        return None
    for i, start in enumerate(starts):
        axis = axis_of(axes[i], len(x)) if axes else i
        step = steps[i] if steps else 1
        size = x[axis].value
        if ends is not None and size is not None:
            x[axis] = constant(len(range(size)[start : ends[i] : step]))
        elif start == 0 and step == 1 and ends is not None and ends[i] >= 2**31 - 1:
            pass
        elif start == 0 and step == 1 and ends_dims is not None and ends_dims[i] == x[axis]:
            pass  # a mask, cut to the length of a sequence that it was made for
        elif start == 0 and step == 1 and ends_dims is not None and ends is None and _is_table(node.inputs[0]):
            x[axis] = ends_dims[i]  # a table of positions, sliced to the length of the sequence, is long enough
        else:
            x[axis] = symbol(f"{node.outputs[0].name}_{axis}")
    return [tuple(x)]


def _is_table(value: ir.Value | None) -> bool:
    return value is not None and value.const_value is not None


def _gather(node: ir.Node, facts: Facts) -> list[Shape] | None:
    x, indices = shape_of(node, 0, facts), facts.shapes.get(node.inputs[1]) if node.inputs[1] else None
    if indices is None:
        return None
    axis = axis_of(node.attributes.get_int("axis", 0), len(x))
    return [(*x[:axis], *indices, *x[axis + 1 :])]


def _unsqueeze(node: ir.Node, facts: Facts) -> list[Shape] | None:
    x, axes = shape_of(node, 0, facts), ints_of(node, 1, facts)
    if axes is None:
        return None
    rank = len(x) + len(axes)
    new = {axis_of(a, rank) for a in axes}
    rest = iter(x)
    return [tuple(constant(1) if i in new else next(rest) for i in range(rank))]


def _squeeze(node: ir.Node, facts: Facts) -> list[Shape] | None:
    x = shape_of(node, 0, facts)
    axes = ints_of(node, 1, facts)
    if axes is None:
        if len(node.inputs) > 1 and node.inputs[1] is not None:
            return None
        axes = [i for i, d in enumerate(x) if d.value == 1]
    gone = {axis_of(a, len(x)) for a in axes}
    return [tuple(d for i, d in enumerate(x) if i not in gone)]


def _expand(node: ir.Node, facts: Facts) -> list[Shape] | None:
    target = facts.elements.get(node.inputs[1]) if node.inputs[1] else None
    return None if target is None else [broadcast([shape_of(node, 0, facts), tuple(target)], facts)]


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
    x = shape_of(node, 0, facts)
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


def sizes_of(node: ir.Node, facts: Facts) -> list[Dim] | None:
    """What a Shape node yields."""
    shape = facts.shapes.get(node.inputs[0]) if node.inputs[0] else None
    if shape is None:
        return None
    end = node.attributes.get_int("end", len(shape))
    return list(shape[node.attributes.get_int("start", 0) : end])


def _shape_of(node: ir.Node, facts: Facts) -> list[Shape]:
    return [(constant(len(sizes_of(node, facts) or [])),)]


def _pad(node: ir.Node, facts: Facts) -> list[Shape] | None:
    x, pads = shape_of(node, 0, facts), ints_of(node, 1, facts)
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
    x = shape_of(node, 0, facts)
    axes = ints_of(node, 1, facts) or node.attributes.get_ints("axes")
    if axes is None and (
        any(v is not None for v in node.inputs[1:]) or node.attributes.get_int("noop_with_empty_axes", False)
    ):
        return None
    axes = range(len(x)) if axes is None else axes
    gone = {axis_of(a, len(x)) for a in axes}
    keep = node.attributes.get_int("keepdims", 1)
    return [tuple(constant(1) if i in gone else d for i, d in enumerate(x) if keep or i not in gone)]


def _argmax(node: ir.Node, facts: Facts) -> list[Shape]:
    x = shape_of(node, 0, facts)
    axis = axis_of(node.attributes.get_int("axis", 0), len(x))
    keep = node.attributes.get_int("keepdims", 1)
    return [tuple(constant(1) if i == axis else d for i, d in enumerate(x) if keep or i != axis)]


def _constant_of_shape(node: ir.Node, facts: Facts) -> list[Shape] | None:
    target = facts.elements.get(node.inputs[0]) if node.inputs[0] else None
    return None if target is None else [tuple(target)]


def attention(node: ir.Node, facts: Facts) -> list[Shape] | None:
    """The shape of an attention over [B,H,S,D]: the query's, with the width of the value."""
    q = shape_of(node, 0, facts)
    v = facts.shapes.get(node.inputs[2]) if node.inputs[2] else None
    if v is None or len(q) != len(v):
        return None
    return [(*q[:-1], v[-1])]


RULES: dict[str, Callable[[ir.Node, Facts], Sequence[Shape | None] | None]] = {
    "ArgMax": _argmax, "ArgMin": _argmax, "Attention": attention, "Concat": _concat,
    "ConstantOfShape": _constant_of_shape, "Conv": _conv, "Expand": _expand, "Gather": _gather, "Gemm": _gemm,
    "MatMul": matmul, "Pad": _pad, "Range": _range, "ReduceL1": _reduce, "ReduceL2": _reduce, "ReduceLogSum": _reduce,
    "ReduceLogSumExp": _reduce, "ReduceMax": _reduce, "ReduceMean": _reduce, "ReduceMin": _reduce,
    "ReduceProd": _reduce, "ReduceSum": _reduce, "ReduceSumSquare": _reduce, "Resize": _resize, "Shape": _shape_of,
    "Slice": _slice, "Split": _split, "Squeeze": _squeeze, "Transpose": _transpose, "Unsqueeze": _unsqueeze,
}  # fmt: skip
