"""Shape rules: compute the shapes of an operator's outputs from the shapes and integer elements of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from fusion_passes.shapes.dims import Dim, constant, symbol
from fusion_passes.shapes.shape_info import (
    Shape,
    ShapeInfo,
    broadcast,
    input_ints,
    input_shape,
    normalize_axis,
    quotient,
    window_attributes,
)

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


def _conv(node: ir.Node, info: ShapeInfo) -> list[Shape] | None:
    x = input_shape(node, 0, info)
    weight = info.shapes.get(node.inputs[1]) if node.inputs[1] is not None else None
    if weight is None or node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
        return None
    spatial = len(x) - 2
    kernel = node.attributes.get_ints("kernel_shape") or [d.value or 1 for d in weight[2:]]
    strides, dilations, pads = window_attributes(node, spatial)
    out = []
    for i in range(spatial):
        extra = pads[i] + pads[i + spatial] - dilations[i] * (kernel[i] - 1) - 1
        out.append((x[2 + i] + constant(extra)) // strides[i] + constant(1))
    return [(x[0], weight[0], *out)]


def _gemm(node: ir.Node, info: ShapeInfo) -> list[Shape] | None:
    a, b = input_shape(node, 0, info), info.shapes.get(node.inputs[1]) if node.inputs[1] else None
    if b is None:
        return None
    rows = a[1] if node.attributes.get_int("transA", 0) else a[0]
    return [(rows, b[0] if node.attributes.get_int("transB", 0) else b[1])]


def matmul(node: ir.Node, info: ShapeInfo) -> list[Shape] | None:
    """Return the output shape of a MatMul with broadcast batch axes."""
    a, b = input_shape(node, 0, info), info.shapes.get(node.inputs[1]) if node.inputs[1] else None
    if b is None or len(a) < 2 or len(b) < 2:
        return None
    return [(*broadcast([a[:-2], b[:-2]], info), a[-2], b[-1])]


def reshape(node: ir.Node, info: ShapeInfo) -> list[Shape] | None:
    """Return the output shape of a Reshape. If -1 stands for an unknown size, that size is a new symbol."""
    x = info.shapes.get(node.inputs[0]) if node.inputs[0] else None
    target = info.elements.get(node.inputs[1]) if node.inputs[1] else None
    if target is None:
        return None
    allow_zero = node.attributes.get_int("allowzero", 0)
    if x is None:  # the target has the rank, and all sizes that do not depend on the input
        dependent = {-1} if allow_zero else {-1, 0}
        name = node.outputs[0].name
        return [tuple(symbol(f"{name}_{i}") if d.value in dependent else d for i, d in enumerate(target))]
    dims = [x[i] if d.value == 0 and not allow_zero and i < len(x) else d for i, d in enumerate(target)]
    if constant(-1) in dims:
        inferred = dims.index(constant(-1))
        others = [d for i, d in enumerate(dims) if i != inferred]
        dims[inferred] = quotient(list(x), others) or symbol(f"{node.outputs[0].name}_{inferred}")
    return [tuple(dims)]


def _transpose(node: ir.Node, info: ShapeInfo) -> list[Shape]:
    x = input_shape(node, 0, info)
    perm = node.attributes.get_ints("perm") or list(range(len(x)))[::-1]
    return [tuple(x[p] for p in perm)]


def _concat(node: ir.Node, info: ShapeInfo) -> list[Shape] | None:
    shapes = [info.shapes.get(v) for v in node.inputs if v is not None]
    if any(s is None for s in shapes):
        return None
    complete = [s for s in shapes if s is not None]
    axis = normalize_axis(node.attributes["axis"].as_int(), len(complete[0]))
    total = sum((s[axis] for s in complete[1:]), start=complete[0][axis])
    for other in complete[1:]:
        pairs = enumerate(zip(complete[0], other, strict=True))
        info.concat_equalities += [(a, b) for i, (a, b) in pairs if i != axis and a != b]
    return [(*complete[0][:axis], total, *complete[0][axis + 1 :])]


def _split(node: ir.Node, info: ShapeInfo) -> list[Shape]:
    x = input_shape(node, 0, info)
    axis = normalize_axis(node.attributes.get_int("axis", 0), len(x))
    sizes = info.elements.get(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] else None
    if sizes is None:  # equal sizes; the last one is smaller if the number of outputs does not divide the axis
        count = len(node.outputs)
        size = (x[axis] + constant(count - 1)) // count
        sizes = [size] * (count - 1) + [x[axis] - size * constant(count - 1)]
    return [(*x[:axis], size, *x[axis + 1 :]) for size in sizes]


def _slice(node: ir.Node, info: ShapeInfo) -> list[Shape] | None:
    x = list(input_shape(node, 0, info))
    starts, ends, axes, steps = (input_ints(node, i, info) for i in range(1, 5))
    start_dims, end_dims = (None if value is None else info.elements.get(value) for value in node.inputs[1:3])
    count = len(starts or start_dims or axes or ())
    if not count:
        return None
    for i in range(count):
        axis = normalize_axis(axes[i], len(x)) if axes else i
        step = steps[i] if steps else 1
        size, length = x[axis].value, None
        if starts is not None and ends is not None and size is not None:
            length = constant(len(range(size)[starts[i] : ends[i] : step]))
        elif step == 1 and start_dims is not None and end_dims is not None:
            length = _symbolic_slice(x[axis], start_dims[i], end_dims[i], _is_table(node.inputs[0]))
        x[axis] = symbol(f"{node.outputs[0].name}_{axis}") if length is None else length
    return [tuple(x)]


def _symbolic_slice(size: Dim, start: Dim | None, end: Dim | None, is_table: bool) -> Dim | None:
    """Return the length of a slice with step 1 if no bound is clamped, else None. A table is taken as long enough."""
    if start is None or end is None:
        return None
    if end.value is not None and end.value >= 2**31 - 1:
        end = size
    length = end - start
    inside = is_table or (_is_positive(start) and _is_positive(size - end))
    return length if inside and _is_positive(length) else None


def _is_positive(dim: Dim) -> bool:
    """Return whether a size or an index is known not to be negative."""
    bound = dim.lower_bound
    return bound is not None and bound >= 0


def _is_table(value: ir.Value | None) -> bool:
    return value is not None and value.const_value is not None


def _gather(node: ir.Node, info: ShapeInfo) -> list[Shape] | None:
    x, indices = input_shape(node, 0, info), info.shapes.get(node.inputs[1]) if node.inputs[1] else None
    if indices is None:
        return None
    axis = normalize_axis(node.attributes.get_int("axis", 0), len(x))
    return [(*x[:axis], *indices, *x[axis + 1 :])]


def _unsqueeze(node: ir.Node, info: ShapeInfo) -> list[Shape] | None:
    x, axes = input_shape(node, 0, info), input_ints(node, 1, info)
    if axes is None:
        return None
    rank = len(x) + len(axes)
    new = {normalize_axis(a, rank) for a in axes}
    rest = iter(x)
    return [tuple(constant(1) if i in new else next(rest) for i in range(rank))]


def _squeeze(node: ir.Node, info: ShapeInfo) -> list[Shape] | None:
    x = input_shape(node, 0, info)
    axes = input_ints(node, 1, info)
    if axes is None:
        if (len(node.inputs) > 1 and node.inputs[1] is not None) or any(d.value is None for d in x):
            return None  # an unknown size may be 1
        axes = [i for i, d in enumerate(x) if d.value == 1]
    removed = {normalize_axis(a, len(x)) for a in axes}
    return [tuple(d for i, d in enumerate(x) if i not in removed)]


def _expand(node: ir.Node, info: ShapeInfo) -> list[Shape] | None:
    target = info.elements.get(node.inputs[1]) if node.inputs[1] else None
    return None if target is None else [broadcast([input_shape(node, 0, info), tuple(target)], info)]


def integer_scales(resize: ir.Node, info: ShapeInfo) -> list[int] | None:
    """Return the scale of each axis of a Resize if all are integers of at least 1, else None.

    Computed sizes count if they are such multiples of the input's sizes for all values of the named sizes.
    """
    x, sizes = resize.inputs[0], resize.inputs[3] if len(resize.inputs) > 3 else None
    if "axes" in resize.attributes or x is None:
        return None
    factors: list[int | None]
    if sizes is not None:
        before, after = info.shapes.get(x), info.elements.get(sizes)
        stretches = resize.attributes.get_string("keep_aspect_ratio_policy", "stretch") == "stretch"
        if before is None or after is None or len(before) != len(after) or not stretches:
            return None
        factors = [_multiple(large, small) for large, small in zip(after, before, strict=True)]
    else:
        value = resize.inputs[2] if len(resize.inputs) > 2 else None
        tensor = ir.convenience.get_const_tensor(value) if value is not None else None
        if tensor is None:
            return None
        scales = [float(scale) for scale in tensor.numpy()]
        factors = [int(scale) if scale >= 1 and scale.is_integer() else None for scale in scales]
    return None if None in factors else [factor for factor in factors if factor is not None]


def _multiple(large: Dim, small: Dim) -> int | None:
    """Return the integer n >= 1 with `large` == n * `small`, or None."""
    if large == small:
        return 1
    if not large.terms or not small.terms:
        return None
    factor = large.terms[0][1] // small.terms[0][1]
    return factor if factor > 1 and small * constant(factor) == large else None


def _resize(node: ir.Node, info: ShapeInfo) -> list[Shape] | None:
    x = input_shape(node, 0, info)
    if "axes" in node.attributes or node.attributes.get_string("keep_aspect_ratio_policy", "stretch") != "stretch":
        return None
    if len(node.inputs) > 3 and node.inputs[3] is not None:
        sizes = info.elements.get(node.inputs[3])
        return None if sizes is None else [tuple(sizes)]
    scales = ir.convenience.get_const_tensor(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] else None
    if scales is None:
        return None
    factors = [float(s) for s in scales.numpy()]
    if any(f != int(f) for f in factors):
        return None
    return [tuple(d * constant(int(f)) for d, f in zip(x, factors, strict=True))]


def shape_elements(node: ir.Node, info: ShapeInfo) -> list[Dim] | None:
    """Return the elements of a Shape node's output, or None if the shape is unknown."""
    shape = info.shapes.get(node.inputs[0]) if node.inputs[0] else None
    if shape is None:
        return None
    end = node.attributes.get_int("end", len(shape))
    return list(shape[node.attributes.get_int("start", 0) : end])


def _shape(node: ir.Node, info: ShapeInfo) -> list[Shape]:
    return [(constant(len(shape_elements(node, info) or [])),)]


def _pad(node: ir.Node, info: ShapeInfo) -> list[Shape] | None:
    x, pads = input_shape(node, 0, info), input_ints(node, 1, info)
    if pads is None or len(pads) != 2 * len(x) or (len(node.inputs) > 3 and node.inputs[3] is not None):
        return None
    return [tuple(d + constant(pads[i] + pads[i + len(x)]) for i, d in enumerate(x))]


def _range(node: ir.Node, info: ShapeInfo) -> list[Shape] | None:
    start, delta = (info.known_ints(node.inputs[i]) for i in (0, 2))
    limit = info.elements.get(node.inputs[1]) if node.inputs[1] else None
    if start == [0] and delta == [1] and limit:
        return [(limit[0],)]
    if start and delta and delta != [0] and limit and limit[0].value is not None:
        return [(constant(len(range(start[0], limit[0].value, delta[0]))),)]
    return [(symbol(f"{node.outputs[0].name}_0"),)]


def _reduce(node: ir.Node, info: ShapeInfo) -> list[Shape] | None:
    x = input_shape(node, 0, info)
    axes = input_ints(node, 1, info) or node.attributes.get_ints("axes")
    if axes is None and (
        any(v is not None for v in node.inputs[1:]) or node.attributes.get_int("noop_with_empty_axes", False)
    ):
        return None
    axes = range(len(x)) if axes is None else axes
    reduced = {normalize_axis(a, len(x)) for a in axes}
    keepdims = node.attributes.get_int("keepdims", 1)
    return [tuple(constant(1) if i in reduced else d for i, d in enumerate(x) if keepdims or i not in reduced)]


def _argmax(node: ir.Node, info: ShapeInfo) -> list[Shape]:
    x = input_shape(node, 0, info)
    axis = normalize_axis(node.attributes.get_int("axis", 0), len(x))
    keepdims = node.attributes.get_int("keepdims", 1)
    return [tuple(constant(1) if i == axis else d for i, d in enumerate(x) if keepdims or i != axis)]


def _constant_of_shape(node: ir.Node, info: ShapeInfo) -> list[Shape] | None:
    target = info.elements.get(node.inputs[0]) if node.inputs[0] else None
    return None if target is None else [tuple(target)]


def attention(node: ir.Node, info: ShapeInfo) -> list[Shape] | None:
    """Return the output shape of an attention on (B, H, S, D): the query's, with the last size of the value's.

    On (B, S, H * D) the value may have fewer heads.
    """
    q = input_shape(node, 0, info)
    v = info.shapes.get(node.inputs[2]) if node.inputs[2] else None
    if v is None or len(q) != len(v):
        return None
    many, few = (node.attributes.get_int(f"{name}_num_heads", 1) or 1 for name in ("q", "kv"))
    width = v[-1]
    if len(q) == 3 and many != few:
        if not isinstance(width, int):
            return None
        width = width // few * many
    return [(*q[:-1], width)]


RULES: dict[str, Callable[[ir.Node, ShapeInfo], Sequence[Shape | None] | None]] = {
    "ArgMax": _argmax, "ArgMin": _argmax, "Attention": attention, "Concat": _concat,
    "ConstantOfShape": _constant_of_shape, "Conv": _conv, "Expand": _expand, "Gather": _gather, "Gemm": _gemm,
    "MatMul": matmul, "Pad": _pad, "Range": _range, "ReduceL1": _reduce, "ReduceL2": _reduce, "ReduceLogSum": _reduce,
    "ReduceLogSumExp": _reduce, "ReduceMax": _reduce, "ReduceMean": _reduce, "ReduceMin": _reduce,
    "ReduceProd": _reduce, "ReduceSum": _reduce, "ReduceSumSquare": _reduce, "Resize": _resize, "Shape": _shape,
    "Slice": _slice, "Split": _split, "Squeeze": _squeeze, "Transpose": _transpose, "Unsqueeze": _unsqueeze,
}  # fmt: skip
