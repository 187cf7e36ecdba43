"""Conversion of a graph to one opset, so that later passes know one form of each operator.

Every node is converted, those of subgraphs too. Between opsets 7 and 24 an operator has
    one definition at both opsets                    it stays unchanged
    a wider one later (`WIDENED`)                    more types, or an attribute with the old behavior as its default
    a form that changed (`CHANGED`)                  a rule rewrites the node to the new form
GroupNormalization (which changed in 21) and Attention (new in 23) are replaced before. Any other operator or attribute
that the other opset lacks keeps the graph at its opset. Below `OPSET` such a graph cannot be fused: function bodies use
newer operators. Below `SHAPES_SINCE` its shapes are not folded either: shape rules read the forms of that opset.

`lower_opset` declares a lowered graph at an older opset, for a provider whose kernels end there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from fusion_passes.graph_edits import new_initializer, unique_name
from fusion_passes.shapes.onnx_inference import STANDARD_DOMAINS, schema
from fusion_passes.shapes.types import opset

OPSET = 21
SHAPES_SINCE = 13
OLDEST, NEWEST = 7, 24
WIDENED = frozenset(
    "Add Cast CastLike Constant ConstantOfShape CumSum DequantizeLinear Div Equal Flatten GRU GreaterOrEqual Identity "
    "If IsInf IsNaN LSTM LeakyRelu LessOrEqual Loop LpPool Mul OptionalGetElement OptionalHasElement PRelu Pad Pow "
    "QLinearMatMul QuantizeLinear RNN ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin "
    "ReduceProd ReduceSumSquare Relu Reshape Resize Scan ScatterElements ScatterND Shape Size Squeeze Sub Transpose "
    "Unsqueeze Where "
    # since 22 for bfloat16 alone
    "Acos Acosh Asin Asinh Atan Atanh Bernoulli Conv ConvTranspose Cos Cosh DeformConv Det Dropout Elu EyeLike "
    "GlobalAveragePool GlobalLpPool GlobalMaxPool GridSample HardSigmoid HardSwish InstanceNormalization "
    "LpNormalization MaxPool MaxRoiPool MaxUnpool Mish Multinomial NegativeLogLikelihoodLoss RandomNormal "
    "RandomNormalLike RandomUniform RandomUniformLike Round Selu Sin Sinh Softplus Softsign Tan ThresholdedRelu "
    "TopK "
    # below 13: more types, negative axes, optional inputs, broadcasting to both sides
    "Abs And ArgMax ArgMin AveragePool Ceil Clip Compress Concat ConstantOfShape DepthToSpace Erf Exp Expand Floor "
    "Gather GatherElements GatherND Gemm Greater LRN Less Log MatMul Max Mean MeanVarianceNormalization Min Mod Neg "
    "NonMaxSuppression NonZero OneHot Or ReduceSum Reciprocal Scatter Sigmoid Sign Slice "
    "Not SoftmaxCrossEntropyLoss SpaceToDepth Sqrt Sum Tanh Tile Xor".split()
)
REPLACED = frozenset({"GroupNormalization", "Attention"})


def unsupported_reason(model: ir.Model) -> str | None:
    """Return the reason why fusions cannot work on the opset of `model`, or None."""
    version = opset(model.graph)
    if version >= OPSET:
        return None
    if version < OLDEST:
        return f"opset {version} cannot be raised to {OPSET}, since it is older than {OLDEST}"
    names = sorted(
        {n.op_type for n in _standard(model.graph) if not (n.op_type in REPLACED or _can_move(n, version, OPSET))}
    )
    if not names:
        return None
    return f"opset {version} cannot be raised to {OPSET}, since its {', '.join(names)} may mean something else there"


def declare_opset(model: ir.Model, target: int = OPSET) -> bool:
    """Convert the model to opset `target`. Return False, without a change, if an operator might change its meaning.

    A newer model is lowered only to `OPSET`.
    """
    version = opset(model.graph)
    if version == target:
        return True
    nodes = _standard(model.graph)
    if not OLDEST <= version <= NEWEST or not all(_can_move(node, version, target) for node in nodes):
        return False
    for node in nodes:
        for since, rewrite in CHANGED.get(node.op_type, ()):
            if version < since <= target:
                rewrite(node)
    model.graph.opset_imports.pop("ai.onnx", None)
    model.graph.opset_imports[""] = target
    return True


def lower_opset(model: ir.Model, newest: int) -> str | None:
    """Declare `model` at opset `newest` if its opset is newer.

    Returns None, or the reason why some operator, of the graph or of a function, does not exist in `newest` or has
    another meaning there; the model is then unchanged.
    """
    version = opset(model.graph)
    if version <= newest:
        return None
    graphs: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    nodes = [node for graph in graphs for node in _standard(graph)]
    foreign = sorted({n.op_type for n in nodes if not _has_meaning(n, version, newest)})
    if foreign:
        return f"its {', '.join(foreign)} of opset {version} cannot be written in opset {newest}"
    for graph in graphs:
        graph.opset_imports.pop("ai.onnx", None)
        graph.opset_imports[""] = newest
    return None


def _standard(graph: ir.Graph | ir.Function) -> list[ir.Node]:
    """Return the standard operators of the graph and of those inside it."""
    return [node for node in ir.traversal.RecursiveGraphIterator(graph) if node.domain in STANDARD_DOMAINS]


def _can_move(node: ir.Node, version: int, target: int) -> bool:
    """Return whether a node means the same at `target`, or a rule in `CHANGED` converts it."""
    if any(version < since <= target for since, _ in CHANGED.get(node.op_type, ())):
        can_convert = CONVERTIBLE.get(node.op_type)
        return can_convert is None or can_convert(node)
    return _has_meaning(node, version, target)


def _has_meaning(node: ir.Node, version: int, other: int) -> bool:
    """Return whether a node of opset `version` has the same meaning in opset `other`."""
    before, after = schema(node.op_type, version), schema(node.op_type, other)
    if after is None or before is None:
        return after is not None
    if before.since_version == after.since_version:
        return True
    if node.op_type == "AveragePool":  # 19 mends the divisor of windows that end behind the padding
        ends_behind = node.attributes.get_int("ceil_mode", 0) and node.attributes.get_int("count_include_pad", 0)
        return not ends_behind and all(name in after.attributes for name in node.attributes)
    if node.op_type == "Scan" and version < 9:  # of batches
        return False
    if node.op_type == "BatchNormalization":  # its training outputs are others since 14
        return len(node.outputs) == 1
    return node.op_type in WIDENED and all(name in after.attributes for name in node.attributes)


# --- Rules: each rewrites a node from the form before an opset to the form since ------------------------------------


def _to_input(attribute: str, index: int, default: int | None = None) -> Callable[[ir.Node], None]:
    """Return the rule that turns an integer attribute, or a list, into input `index`; without one, nothing."""

    def rewrite(node: ir.Node) -> None:
        if attribute in node.attributes:
            _add_input(node, attribute, np.array(node.attributes.pop(attribute).value, np.int64), index)
        elif default is not None:
            _add_input(node, attribute, np.array(default, np.int64), index)

    return rewrite


def _add_input(node: ir.Node, name: str, array: np.ndarray, index: int) -> None:
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    node.resize_inputs(max(index + 1, len(node.inputs)))
    node.replace_input_with(index, new_initializer(graph, unique_name(node.outputs[0], name), array))


def _pop(node: ir.Node, *names: str) -> list[Any]:
    """Remove attributes of a node and return their values, None for an absent one."""
    return [node.attributes.pop(name).value if name in node.attributes else None for name in names]


def _clip_limits(node: ir.Node) -> None:
    for index, (name, limit) in enumerate(zip(("min", "max"), _pop(node, "min", "max"), strict=True), start=1):
        if limit is not None:
            _add_input(node, name, np.array(limit, _float_type(node)), index)


def _pad_inputs(node: ir.Node) -> None:
    pads, value = _pop(node, "pads", "value")
    _add_input(node, "pads", np.array(pads, np.int64), 1)
    if value:
        _add_input(node, "value", np.array(value, _float_type(node)), 2)


def _float_type(node: ir.Node) -> np.dtype:
    """Return the dtype of the data, float32 if the graph does not declare it."""
    x = node.inputs[0]
    return (x.dtype if x is not None and x.dtype is not None else ir.DataType.FLOAT).numpy()


def _slice_inputs(node: ir.Node) -> None:
    for index, (name, numbers) in enumerate(
        zip(("starts", "ends", "axes"), _pop(node, "starts", "ends", "axes"), strict=True), start=1
    ):
        if numbers is not None:
            _add_input(node, name, np.array(numbers, np.int64), index)


def _top_k_count(node: ir.Node) -> None:
    (k,) = _pop(node, "k")
    _add_input(node, "k", np.array([k], np.int64), 1)


def _upsample_to_resize(node: ir.Node) -> None:
    """Upsample (scales as an attribute in 7, as an input in 9) -> Resize of opset 11."""
    (scales,) = _pop(node, "scales")
    if scales is not None:
        _add_input(node, "scales", np.array(scales, np.float32), 1)
    node.op_type = "Resize"
    _resize_inputs(node)


def _resize_inputs(node: ir.Node) -> None:
    """Resize (X, scales) of opset 10 -> (X, , scales) with the coordinates that ONNX Runtime uses for the old form."""
    scales = node.inputs[1]
    shrinks = _scale_kinds(scales) == {True}
    node.resize_inputs(3)
    node.replace_input_with(1, None)
    node.replace_input_with(2, scales)
    node.attributes["coordinate_transformation_mode"] = ir.AttrString("coordinate_transformation_mode", "asymmetric")
    node.attributes["nearest_mode"] = ir.AttrString("nearest_mode", "ceil" if shrinks else "floor")


def _scale_kinds(scales: ir.Value | None) -> set[bool] | None:
    """Return for constant scales other than 1 whether they shrink: one truth for all, or both; None if unknown."""
    tensor = ir.convenience.get_const_tensor(scales) if scales is not None else None
    return None if tensor is None else {bool(scale < 1) for scale in tensor.numpy() if scale != 1}


def _can_resize(node: ir.Node) -> bool:
    """ONNX Runtime rounds the nearest pixel up where an axis shrinks and down where it grows."""
    if node.attributes.get_string("mode", "nearest") != "nearest":
        return True
    if node.op_type == "Upsample":  # never shrinks
        return True
    kinds = _scale_kinds(node.inputs[1])
    return kinds is not None and len(kinds) < 2


def _softmax_axis(node: ir.Node) -> None:
    """Below 13 the axes from `axis` on are one: Flatten -> Softmax -> Reshape, or the last axis alone."""
    graph, x, y = node.graph, node.inputs[0], node.outputs[0]
    assert isinstance(graph, ir.Graph)
    assert x is not None
    axis = node.attributes.get_int("axis", 1)
    rank = x.shape.rank() if x.shape is not None else None
    node.attributes["axis"] = ir.AttrInt64("axis", -1)
    if axis == -1 or (rank is not None and axis in (rank - 1, -1)):
        return
    shape = ir.Node("", "Shape", [x], outputs=[ir.Value(name=unique_name(y, "shape"))])
    flat = ir.Node("", "Flatten", [x], [ir.AttrInt64("axis", axis)], outputs=[ir.Value(name=unique_name(y, "flat"))])
    back = ir.Node("", "Reshape", [y, shape.outputs[0]], outputs=[ir.Value(name=unique_name(y, "reshaped"))])
    ir.convenience.replace_all_uses_with(y, back.outputs[0], replace_graph_outputs=True)
    back.replace_input_with(0, y)
    name = y.name
    y.name, back.outputs[0].name = unique_name(y, "softmax"), name
    node.replace_input_with(0, flat.outputs[0])
    graph.insert_before(node, [shape, flat])
    graph.insert_after(node, [back])


def _drop(*names: str) -> Callable[[ir.Node], None]:
    """Return the rule that removes attributes which have no effect at inference."""

    def rewrite(node: ir.Node) -> None:
        _pop(node, *names)

    return rewrite


def _rename(op_type: str) -> Callable[[ir.Node], None]:
    """Return the rule that gives an operator its new name."""

    def rewrite(node: ir.Node) -> None:
        node.op_type = op_type

    return rewrite


def _count_outputs(node: ir.Node) -> None:
    if len(node.inputs) < 2:
        node.attributes["num_outputs"] = ir.AttrInt64("num_outputs", len(node.outputs))


def _rename_mode(node: ir.Node) -> None:
    mode = node.attributes.get_string("mode", "bilinear")
    node.attributes["mode"] = ir.AttrString("mode", {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode))


def _old_coordinates(node: ir.Node) -> None:
    node.attributes["coordinate_transformation_mode"] = ir.AttrString(
        "coordinate_transformation_mode", "output_half_pixel"
    )


# Operator -> (opset in which its form changed, rule that rewrites the old form to the new one), oldest first.
Changes = tuple[tuple[int, Callable[[ir.Node], None]], ...]
CHANGED: Mapping[str, Changes] = {
    "BatchNormalization": ((9, _drop("spatial")),),
    "Clip": ((11, _clip_limits),),
    "DFT": ((20, _to_input("axis", 2, default=1)),),
    "Dropout": ((12, _drop("ratio")),),
    "GridSample": ((20, _rename_mode),),
    "Hardmax": ((13, _softmax_axis),),
    "LogSoftmax": ((13, _softmax_axis),),
    "Pad": ((11, _pad_inputs),),
    "ReduceSum": ((13, _to_input("axes", 1)),),
    "Resize": ((11, _resize_inputs),),
    "RoiAlign": ((16, _old_coordinates),),
    "Scatter": ((11, _rename("ScatterElements")),),
    "Slice": ((10, _slice_inputs),),
    "Softmax": ((13, _softmax_axis),),
    "Split": ((13, _to_input("split", 1)), (18, _count_outputs)),
    "Squeeze": ((13, _to_input("axes", 1)),),
    "TopK": ((10, _top_k_count),),
    "Unsqueeze": ((13, _to_input("axes", 1)),),
    "Upsample": ((10, _upsample_to_resize),),
    **{
        f"Reduce{name}": ((18, _to_input("axes", 1)),)
        for name in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")
    },
}
# What a rule cannot convert: training outputs, statistics by position, mixed rounding.
CONVERTIBLE: Mapping[str, Callable[[ir.Node], bool]] = {
    "BatchNormalization": lambda node: len(node.outputs) == 1 and node.attributes.get_int("spatial", 1) == 1,
    "Dropout": lambda node: len(node.outputs) == 1 or not node.outputs[1].uses(),
    "Resize": _can_resize,
    "Upsample": _can_resize,
}
