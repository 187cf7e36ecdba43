"""Element types of values: exporters leave some out, and a rule that compares them must not guess."""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.shapes.rules import BROADCAST, RULES, SAME_AS_FIRST_INPUT

# Other operators whose result is of the type of their first input.
AS_FIRST_INPUT = frozenset(
    "CumSum GatherElements GatherND RandomNormalLike ReduceMin ReduceProd ReduceSumSquare ScaledDotProductAttention "
    "ScatterElements ScatterND Sum Tile Unique".split()
)
BOOLEAN = frozenset("And Equal Greater GreaterOrEqual IsInf IsNaN Less LessOrEqual Not Or Xor".split())


def annotate_types(graph: ir.Graph) -> None:
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
