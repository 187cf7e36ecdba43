"""Element types of values: exporters leave some out, and a rule that compares them must not guess."""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators import BY_NAME
from fusion_passes.operators.record import CONTRIB, DOMAIN
from fusion_passes.shapes.facts import Facts
from fusion_passes.shapes.rules import BROADCAST, RULES, SAME_AS_FIRST_INPUT
from fusion_passes.shapes.standard import STANDARD, infer_node

# Other operators whose result is of the type of their first input.
AS_FIRST_INPUT = frozenset(
    "CumSum GatherElements GatherND RandomNormalLike ReduceMin ReduceProd ReduceSumSquare "
    "ScatterElements ScatterND Sum Tile Unique".split()
)
# Operators of ONNX Runtime's own domain that mean what the fused operators of that name do.
IN_CONTRIB = BY_NAME.keys() | {"FastGelu", "Gelu"}
BOOLEAN = frozenset("And Equal Greater GreaterOrEqual IsInf IsNaN Less LessOrEqual Not Or Xor".split())


def is_known(node: ir.Node) -> bool:
    """Whether an operator means what its name says here: a name in another's domain may be anything."""
    return node.domain in (*STANDARD, DOMAIN) or (node.domain == CONTRIB and node.op_type in IN_CONTRIB)


def opset(graph: ir.Graph) -> int:
    """The opset whose operators the graph is written in."""
    return graph.opset_imports.get("", graph.opset_imports.get("ai.onnx", 21))


def annotate_types(graph: ir.Graph, version: int | None = None) -> None:
    """Element types of all values: exporters leave some out, and a rule that compares them must not guess."""
    version = version or opset(graph)
    for value in graph.initializers.values():
        if value.const_value is not None:
            value.type = ir.TensorType(value.const_value.dtype)
    for node in graph:
        if is_known(node) and any(output.dtype is None for output in node.outputs):
            _annotate_outputs(node, version)


def _annotate_outputs(node: ir.Node, version: int) -> None:
    inputs = [v.dtype for v in node.inputs if v is not None]
    found: list[ir.DataType | None] = []
    if node.op_type == "If":
        body = node.attributes["then_branch"].as_graph()
        annotate_types(body, version)
        found = [value.dtype for value in body.outputs]
    else:
        found = [
            ir.DataType.FLOAT if is_statistic(node, i) else _result_type(node, inputs) for i in range(len(node.outputs))
        ]
    if None in found and None not in inputs:
        known = [dtype for _, dtype in infer_node(node, Facts(), version)]
        found = [mine or theirs for mine, theirs in zip(found, known or found, strict=True)]
    for output, dtype in zip(node.outputs, found, strict=True):
        if output.dtype is None and dtype is not None:
            output.dtype = dtype


def is_statistic(node: ir.Node, index: int) -> bool:
    """Whether an output is a normalization's mean or inverse deviation, which are float32 whatever the input is."""
    operator = BY_NAME.get(node.op_type)
    return index in ((1, 2) if node.op_type == "LayerNormalization" else operator.statistics if operator else ())


def _result_type(node: ir.Node, inputs: list[ir.DataType | None]) -> ir.DataType | None:
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
    as_first = node.op_type in SAME_AS_FIRST_INPUT | BROADCAST | AS_FIRST_INPUT | RULES.keys() | BY_NAME.keys()
    return inputs[0] if inputs and as_first else None
