"""Inference of dtypes: exporters omit some, and rules compare them."""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes import CONTRIB, DOMAIN
from fusion_passes.operators import BY_NAME
from fusion_passes.shapes.onnx_inference import STANDARD_DOMAINS, infer_node
from fusion_passes.shapes.rules import BROADCAST, RULES, SAME_AS_FIRST_INPUT
from fusion_passes.shapes.shape_info import ShapeInfo

# Further operators whose output has the dtype of the first input.
FIRST_INPUT_DTYPE = frozenset(
    "CumSum GatherElements GatherND RandomNormalLike ReduceMin ReduceProd ReduceSumSquare "
    "ScatterElements ScatterND Sum Tile Unique".split()
)
# Operators of ONNX Runtime's domain whose shape and dtype rules are those of the fused operators of the same name.
CONTRIB_OPERATORS = BY_NAME.keys() | {"FastGelu", "Gelu"}
BOOLEAN = frozenset("And Equal Greater GreaterOrEqual IsInf IsNaN Less LessOrEqual Not Or Xor".split())


def is_known(node: ir.Node) -> bool:
    """Return whether the rules for an operator's name apply to a node: not if its domain is a third party's."""
    return node.domain in (*STANDARD_DOMAINS, DOMAIN) or (node.domain == CONTRIB and node.op_type in CONTRIB_OPERATORS)


def opset(graph: ir.Graph) -> int:
    """Return the opset of the standard domain that the graph imports."""
    return graph.opset_imports.get("", graph.opset_imports.get("ai.onnx", 21))


def annotate_types(graph: ir.Graph, version: int | None = None) -> None:
    """Set the dtypes of all values of `graph` that have none."""
    version = version or opset(graph)
    for value in graph.initializers.values():
        if value.const_value is not None:
            value.type = ir.TensorType(value.const_value.dtype)
    for node in graph:
        if is_known(node) and any(output.dtype is None for output in node.outputs):
            _annotate_outputs(node, version)


def _annotate_outputs(node: ir.Node, version: int) -> None:
    inputs = [v.dtype for v in node.inputs if v is not None]
    dtypes: list[ir.DataType | None] = []
    if node.op_type == "If":
        body = node.attributes["then_branch"].as_graph()
        annotate_types(body, version)
        dtypes = [value.dtype for value in body.outputs]
    else:
        common = _output_dtype(node, inputs)
        dtypes = [ir.DataType.FLOAT if is_float32_output(node, i) else common for i in range(len(node.outputs))]
    if None in dtypes and None not in inputs:
        inferred = [dtype for _, dtype in infer_node(node, ShapeInfo(), version)]
        dtypes = [by_rule or by_onnx for by_rule, by_onnx in zip(dtypes, inferred or dtypes, strict=True)]
    for output, dtype in zip(node.outputs, dtypes, strict=True):
        if output.dtype is None and dtype is not None:
            output.dtype = dtype


def is_float32_output(node: ir.Node, index: int) -> bool:
    """Return whether an output is the mean or inverse deviation of a normalization: float32 for any input dtype."""
    operator = BY_NAME.get(node.op_type)
    return index in ((1, 2) if node.op_type == "LayerNormalization" else operator.float32_outputs if operator else ())


def _output_dtype(node: ir.Node, inputs: list[ir.DataType | None]) -> ir.DataType | None:
    if node.op_type in ("Shape", "ArgMax", "ArgMin", "Size"):
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
    if (operator := BY_NAME.get(node.op_type)) is not None:
        typed = node.inputs[operator.dtype_input] if operator.dtype_input < len(node.inputs) else None
        return None if typed is None else typed.dtype
    same = node.op_type in SAME_AS_FIRST_INPUT | BROADCAST | FIRST_INPUT_DTYPE | RULES.keys()
    return inputs[0] if inputs and same else None
