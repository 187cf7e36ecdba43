"""Declare every graph at one opset, so that later passes know one form of each operator.

Node by node, those of inner graphs too. Between opsets 13 and 24 an operator has
    one definition at both opsets                    it stays as it is
    a wider one later (`WIDENED`)                    more types, or an attribute whose default is what was before
    a form that changed (`CHANGED`)                  a rule rewrites the node
        Split (< 18)                                 num_outputs becomes an attribute when no sizes are given
        ReduceMean and its like (< 18)               axes become an input
        DFT (< 20)                                   so does its axis
        GridSample (< 20)                            modes have other names
        RoiAlign (< 16)                              the old coordinates become a mode
GroupNormalization (which changed in 21) and Attention (new in 23) are replaced before. What is left (an operator or an
attribute that the other opset lacks) keeps the graph at its opset. Below `OPSET` it cannot be fused then: function
bodies are written in newer operators.

`lower_opset` declares a lowered graph at an older opset, for a provider whose kernels end there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir

from fusion_passes.graph_edits import new_initializer, unique_name
from fusion_passes.shapes.onnx_inference import STANDARD_DOMAINS, schema
from fusion_passes.shapes.types import opset

OPSET = 21
OLDEST, NEWEST = 13, 24
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
    "TopK".split()
)
REPLACED = frozenset({"GroupNormalization", "Attention"})


def why_not_fused(model: ir.Model) -> str | None:
    """Why `model` is of an opset that fusions cannot work on, or None."""
    version = opset(model.graph)
    if version >= OPSET:
        return None
    if version < OLDEST:
        return f"opset {version} cannot be raised to {OPSET}, since it is older than {OLDEST}"
    foreign = sorted({n.op_type for n in _standard(model) if not (n.op_type in REPLACED or _can_move(n, version))})
    if not foreign:
        return None
    return f"opset {version} cannot be raised to {OPSET}, since its {', '.join(foreign)} may mean something else there"


def declare_opset(model: ir.Model) -> bool:
    """Set the model's opset to `OPSET`; False (and no change) when an operator might change its meaning."""
    version = opset(model.graph)
    if version == OPSET:
        return True
    nodes = _standard(model)
    if not OLDEST <= version <= NEWEST or not all(_can_move(node, version) for node in nodes):
        return False
    for node in nodes:
        if node.op_type in CHANGED and version < CHANGED[node.op_type][0]:
            CHANGED[node.op_type][1](node)
    model.graph.opset_imports.pop("ai.onnx", None)
    model.graph.opset_imports[""] = OPSET
    return True


def lower_opset(model: ir.Model, newest: int) -> str | None:
    """Declare `model` at opset `newest` if its opset is newer.

    Returns None, or the reason why some operator does not exist in `newest` or has another meaning there; the model is
    then unchanged. Functions are not looked at: `operators.function_bodies.attach` writes them for the model's opset.
    """
    version = opset(model.graph)
    if version <= newest:
        return None
    foreign = sorted({n.op_type for n in _standard(model) if not _has_meaning(n, version, newest)})
    if foreign:
        return f"its {', '.join(foreign)} of opset {version} cannot be written in opset {newest}"
    model.graph.opset_imports.pop("ai.onnx", None)
    model.graph.opset_imports[""] = newest
    return None


def _standard(model: ir.Model) -> list[ir.Node]:
    """The standard operators of the graph and of those inside it."""
    return [node for node in ir.traversal.RecursiveGraphIterator(model.graph) if node.domain in STANDARD_DOMAINS]


def _can_move(node: ir.Node, version: int) -> bool:
    """Return whether a node means the same at `OPSET`, or a rule makes it do so."""
    if version < OPSET and node.op_type in CHANGED:
        return schema(node.op_type, OPSET) is not None
    return _has_meaning(node, version, OPSET)


def _has_meaning(node: ir.Node, version: int, other: int) -> bool:
    """Return whether a node of opset `version` has the same meaning in opset `other`."""
    before, after = schema(node.op_type, version), schema(node.op_type, other)
    if after is None or before is None:
        return after is not None
    if before.since_version == after.since_version:
        return True
    if node.op_type == "AveragePool":  # 19 mends the divisor of windows that end behind the padding
        return not (node.attributes.get_int("ceil_mode", 0) and node.attributes.get_int("count_include_pad", 0))
    if node.op_type == "BatchNormalization":  # its training outputs are others since 14
        return len(node.outputs) == 1
    return node.op_type in WIDENED and all(name in after.attributes for name in node.attributes)


def _axes_to_input(node: ir.Node) -> None:
    if "axes" in node.attributes:
        _attribute_to_input(node, "axes", list(node.attributes["axes"].as_ints()), 1)


def _axis_to_input(node: ir.Node) -> None:
    axis = node.attributes.get_int("axis", 1)
    _attribute_to_input(node, "axis", axis, 2)


def _attribute_to_input(node: ir.Node, name: str, numbers: int | list[int], index: int) -> None:
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    node.attributes.pop(name, None)
    value = new_initializer(graph, unique_name(node.outputs[0], name), np.array(numbers, np.int64))
    node.resize_inputs(max(index + 1, len(node.inputs)))
    node.replace_input_with(index, value)


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


# Operator -> the opset in which its form changed, and the rule that makes the old form the new one.
CHANGED: Mapping[str, tuple[int, Callable[[ir.Node], None]]] = {
    "DFT": (20, _axis_to_input),
    "GridSample": (20, _rename_mode),
    "RoiAlign": (16, _old_coordinates),
    "Split": (18, _count_outputs),
    **{
        f"Reduce{name}": (18, _axes_to_input)
        for name in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")
    },
}
