"""Missing kernels of the ROCm provider in onnxruntime-rocm 1.22.2, and the last opsets of the others.

ONNX Runtime takes a kernel without an upper version for operators of exactly its first version. An operator whose
definition is newer runs on the CPU, between two copies, and its graph cannot be captured. At opset 21 that is Reshape,
Transpose, Shape and Cast among others.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

NEWEST_OPSET = 20  # at which every operator of a Stable Diffusion pipeline has its kernel

# First version of each operator's newest kernel -> operators of ai.onnx. Read from the library's symbols:
# tests/runtime/test_rocm_wheel.py compares both.
_NEWEST_KERNELS = {
    1: "Affine Crop DynamicSlice GlobalAveragePool GlobalMaxPool ImageScaler Not ParametricSoftplus RandomNormal "
    "RandomNormalLike RandomUniform RandomUniformLike ScaledTanh SimplifiedLayerNormalization Softplus Softsign",
    6: "Elu HardSigmoid InstanceNormalization Selu",
    7: "And Cos Or Sin Xor",
    9: "ConstantOfShape EyeLike Shrink",
    10: "MatMulInteger ReverseSequence RoiAlign ThresholdedRelu",
    11: "AveragePool Compress ConcatFromSequence Conv ConvTranspose NonMaxSuppression OneHot Range Round SequenceAt "
    "SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength TopK",
    12: "Einsum MaxPool",
    13: "Abs ArgMax ArgMin Ceil Clip Concat DepthToSpace Dropout Equal Erf Exp Expand Flatten Floor Gather "
    "GatherElements GatherND Gemm Greater LRN Less Log LogSoftmax MatMul Max Min Mod Neg NonZero Reciprocal ReduceSum "
    "Sigmoid Sign Size Slice Softmax SpaceToDepth Sqrt Squeeze Sum Tanh Tile Transpose Unsqueeze",
    14: "Add CumSum Div Mul Relu Sub Trilu",
    15: "BatchNormalization Pow",
    16: "GreaterOrEqual LeakyRelu LessOrEqual PRelu Where",
    17: "LayerNormalization",
    18: "Pad ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSumSquare "
    "Resize ScatterElements ScatterND Split",
    19: "Cast Identity If Loop Reshape Scan Shape",
    20: "Gelu IsInf IsNaN",
    21: "DequantizeLinear QuantizeLinear",
}
NEWEST_KERNEL = {op_type: version for version, names in _NEWEST_KERNELS.items() for op_type in names.split()}

# Operators whose kernel gives wrong values on GPUs with waves of 32 lanes (RDNA), since it is compiled for waves of 64:
# Softmax for 33 to 1024 columns, and LayerNormalization, which counts the squared deviations twice.
WRONG_ON_RDNA = frozenset({"Softmax", "LogSoftmax", "LayerNormalization", "SimplifiedLayerNormalization"})
CONTRIB = "com.microsoft"


@cache
def unsupported_reason(domain: str, op_type: str, opset: int) -> str | None:
    """Return why the ROCm provider does not run an operator of ai.onnx `opset`, or None if its table has no reason.

    Element types are not looked at: ArgMax of int64, for one, has no kernel either.
    """
    if (domain, op_type) == (CONTRIB, "MultiHeadAttention"):
        return "its kernel rejects every form: the wheel is built without Composable Kernel"
    if domain not in ("", "ai.onnx") or op_type == "Constant":
        return None
    newest = NEWEST_KERNEL.get(op_type)
    if newest is None:
        return "it has no kernel"
    import onnx

    since = onnx.defs.get_schema(op_type, opset, "").since_version
    return f"its newest kernel is of version {newest}, the operator of {since}" if since > newest else None


def newer_operators(model: onnx.ModelProto) -> list[str]:
    """Return the operators of the graph that run on the CPU since its opset is above `NEWEST_OPSET`, sorted."""
    opset = standard_opset(model.opset_import)
    if opset <= NEWEST_OPSET:
        return []
    names = {node.op_type for node in model.graph.node if node.domain in ("", "ai.onnx")}
    return sorted(
        name
        for name in names & NEWEST_KERNEL.keys()
        if unsupported_reason("", name, opset) and not unsupported_reason("", name, NEWEST_OPSET)
    )


def standard_opset(imports: Iterable[onnx.OperatorSetIdProto]) -> int:
    """Return the opset of ai.onnx that `imports` name, 0 if none."""
    return next((each.version for each in imports if each.domain in ("", "ai.onnx")), 0)
