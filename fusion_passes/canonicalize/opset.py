"""Declare every graph at one opset, so that later passes know one form of each operator.

The operators of Stable Diffusion graphs mean the same in opsets 13 to 24, but for those listed here:
    Split (< 18)                       num_outputs becomes an attribute when no sizes are given
    ReduceMean and its like (< 18)     axes become an input
GroupNormalization (which changed in 21) and Attention (new in 23) are replaced before. Graphs with an operator outside
the list keep their opset. Below `OPSET` they cannot be fused then: function bodies are written in newer operators.
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.rewriting import constant

OPSET = 21
OLDEST, NEWEST = 13, 24
SAME = frozenset(
    "Add And ArgMax Cast Ceil Clip Concat Constant ConstantOfShape Conv Cos Div Equal Erf Exp Expand Flatten Floor "
    "Gather GatherElements GatherND Gelu Gemm Greater GreaterOrEqual Identity InstanceNormalization IsInf "
    "IsNaN LayerNormalization Less LessOrEqual Log MatMul Max Min Mod Mul Neg Not Or Pad Pow Range Reciprocal Relu "
    "Reshape Resize ScatterND Shape Sigmoid Sin Slice Softmax Split Sqrt Squeeze Sub Tanh Tile Transpose Trilu "
    "Unsqueeze Where ReduceSum Size CumSum NonZero Abs Sign Round Softplus "
    "Dropout Einsum GlobalAveragePool LogSoftmax RandomNormal RandomNormalLike Sum "
    "Celu Elu HardSigmoid HardSwish LeakyRelu Mish PRelu Selu Softsign ThresholdedRelu Xor".split()
)


REDUCTIONS = frozenset(
    "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSumSquare".split()
)
REPLACED = frozenset({"GroupNormalization", "Attention"})


def why_not_fused(model: ir.Model) -> str | None:
    """Why `model` is of an opset that fusions cannot work on, or None."""
    version = model.graph.opset_imports.get("", 0)
    foreign = sorted({n.op_type for n in _standard(model)} - SAME - REDUCTIONS - REPLACED)
    if version >= OPSET or (version >= OLDEST and not foreign):
        return None
    reason = f"its {', '.join(foreign)} may mean something else there" if foreign else f"it is older than {OLDEST}"
    return f"opset {version} cannot be raised to {OPSET}, since {reason}"


def _standard(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.domain in ("", "ai.onnx")]


def declare_opset(model: ir.Model) -> bool:
    """Set the model's opset to `OPSET`; False (and no change) when an operator might change its meaning."""
    version = model.graph.opset_imports.get("", 0)
    if version == OPSET:
        return True
    standard = _standard(model)
    if not OLDEST <= version <= NEWEST or any(n.op_type not in SAME | REDUCTIONS for n in standard):
        return False
    for node in standard:
        if version < 18 and node.op_type in REDUCTIONS and "axes" in node.attributes:
            _axes_to_input(model.graph, node)
        if version < 18 and node.op_type == "Split" and len(node.inputs) < 2:
            node.attributes["num_outputs"] = ir.AttrInt64("num_outputs", len(node.outputs))
    model.graph.opset_imports[""] = OPSET
    return True


def _axes_to_input(graph: ir.Graph, node: ir.Node) -> None:
    axes = constant(graph, f"{node.outputs[0].name}.axes", list(node.attributes.pop("axes").as_ints()))
    node.resize_inputs(2)
    node.replace_input_with(1, axes)
