"""ONNX's own inference, one node at a time: what an operator without a rule of ours yields.

It knows every standard operator's types and ranks, and sizes where they are numbers or carried over; a size that it
cannot tell becomes a symbol of its own. So an operator without a rule costs one value and not all that is behind it.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
import onnx_ir as ir

from fusion_passes.shapes.dims import Dim, constant, symbol
from fusion_passes.shapes.facts import Facts, Shape

STANDARD = ("", "ai.onnx")
CONTROL_FLOW = frozenset({"If", "Loop", "Scan", "SequenceMap"})


@cache
def schema(op_type: str, version: int) -> onnx.defs.OpSchema | None:
    """The definition of a standard operator at an opset, or None where it has none."""
    try:
        return onnx.defs.get_schema(op_type, version, "")
    except onnx.defs.SchemaError:
        return None


def infer_node(node: ir.Node, facts: Facts, version: int) -> list[tuple[Shape | None, ir.DataType | None]]:
    """Shape and element type of each output, None where ONNX cannot tell: (shape, type) in order, or nothing."""
    definition = schema(node.op_type, version) if node.domain in STANDARD else None
    if definition is None or node.op_type in CONTROL_FLOW:
        return []
    sizes: dict[str, Dim] = {}
    proto = onnx.NodeProto(op_type=node.op_type)
    types, data = {}, {}
    for index, value in enumerate(node.inputs):
        name = "" if value is None else f"i{index}"
        proto.input.append(name)
        if value is not None:
            types[name] = _type(value, facts.shapes.get(value), sizes)
            numbers = _numbers(value, facts)
            if numbers is not None:
                data[name] = numbers
    proto.output.extend(f"o{index}" for index in range(len(node.outputs)))
    proto.attribute.extend(ir.to_proto(attribute) for attribute in node.attributes.values())
    opsets = [onnx.helper.make_opsetid("", version)]
    try:
        known = onnx.shape_inference.infer_node_outputs(definition, proto, types, data or None, None, opsets)
    except Exception:  # an operand of a type or shape that the operator does not take: ONNX Runtime will say so
        return []
    return [_read(known.get(f"o{i}"), output, sizes) for i, output in enumerate(node.outputs)]


def _type(value: ir.Value, shape: Shape | None, sizes: dict[str, Dim]) -> onnx.TypeProto:
    dtype = value.dtype or ir.DataType.FLOAT
    if shape is None:
        return onnx.helper.make_tensor_type_proto(int(dtype), None)
    names = {d: name for name, d in sizes.items()}
    for d in shape:
        if d.value is None:
            sizes[names.setdefault(d, f"s{len(names)}")] = d
    return onnx.helper.make_tensor_type_proto(int(dtype), [names[d] if d.value is None else d.value for d in shape])


def _numbers(value: ir.Value, facts: Facts) -> onnx.TensorProto | None:
    """What a small integer tensor holds: sizes, axes, repeats."""
    numbers, shape = facts.static(value), facts.shapes.get(value)
    if numbers is None or shape is None:
        return None
    dtype = value.dtype or ir.DataType.INT64
    return onnx.numpy_helper.from_array(np.array(numbers, dtype.numpy()).reshape([d.value or 0 for d in shape]))


def _read(
    known: onnx.TypeProto | None, output: ir.Value, sizes: dict[str, Dim]
) -> tuple[Shape | None, ir.DataType | None]:
    if known is None or not known.HasField("tensor_type"):
        return None, None
    tensor = known.tensor_type
    dtype = ir.DataType(tensor.elem_type) if tensor.elem_type else None
    if not tensor.HasField("shape"):
        return None, dtype
    shape = []
    for axis, dim in enumerate(tensor.shape.dim):
        if dim.HasField("dim_value"):
            shape.append(constant(dim.dim_value))
        else:
            shape.append(sizes.get(dim.dim_param) or symbol(f"{output.name}_{axis}"))
    return tuple(shape), dtype
