"""Declare every graph at one opset, so that later passes know one form of each operator.

The operators of Stable Diffusion graphs mean the same in opsets 13 to 24, but for those listed here:
    Split (< 18)                     num_outputs becomes an attribute when no sizes are given
    ReduceMean, ReduceMax (< 18)     axes become an input
GroupNormalization (which changed in 21) and Attention (new in 23) have been replaced before. Graphs with an operator
outside the list keep their opset, and the pass says so by returning False.
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes._lazy import constant

OPSET = 21
OLDEST, NEWEST = 13, 24
SAME = frozenset(
    "Add And ArgMax Cast Ceil Clip Concat Constant ConstantOfShape Conv Cos Div Equal Erf Exp Expand Flatten Floor "
    "Gather GatherElements GatherND Gelu Gemm Greater GreaterOrEqual Identity InstanceNormalization IsInf "
    "IsNaN LayerNormalization Less LessOrEqual Log MatMul Max Min Mod Mul Neg Not Or Pad Pow Range Reciprocal Relu "
    "Reshape Resize ScatterND Shape Sigmoid Sin Slice Softmax Split Sqrt Squeeze Sub Tanh Tile Transpose Trilu "
    "Unsqueeze Where ReduceMean ReduceMax ReduceSum ReduceMin Size CumSum NonZero Abs Sign Round Softplus "
    "Dropout Einsum GlobalAveragePool LogSoftmax RandomNormal RandomNormalLike Sum".split()
)


def declare_opset(model: ir.Model) -> bool:
    """Set the model's opset to `OPSET`; False (and no change) when an operator might change its meaning."""
    version = model.graph.opset_imports.get("", 0)
    if version == OPSET:
        return True
    standard = [n for n in model.graph if n.domain in ("", "ai.onnx")]
    if not OLDEST <= version <= NEWEST or any(n.op_type not in SAME for n in standard):
        return False
    for node in standard:
        if version < 18 and node.op_type in ("ReduceMean", "ReduceMax", "ReduceMin") and "axes" in node.attributes:
            _axes_to_input(model.graph, node)
        if version < 18 and node.op_type == "Split" and len(node.inputs) < 2:
            node.attributes["num_outputs"] = ir.AttrInt64("num_outputs", len(node.outputs))
    model.graph.opset_imports[""] = OPSET
    return True


def _axes_to_input(graph: ir.Graph, node: ir.Node) -> None:
    axes = constant(graph, f"{node.outputs[0].name}.axes", list(node.attributes.pop("axes").as_ints()))
    node.resize_inputs(2)
    node.replace_input_with(1, axes)
