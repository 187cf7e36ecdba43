"""ONNX's shape inference for one node, used for operators without a shape rule.

It covers all standard operators. Sizes are integers, input sizes, or new symbols if unknown. An operator without a
rule thus loses the sizes of one value, not of all values after it.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
import onnx_ir as ir

from fusion_passes.shapes.dims import Dim, constant, symbol
from fusion_passes.shapes.shape_info import Shape, ShapeInfo

STANDARD_DOMAINS = ("", "ai.onnx")
CONTROL_FLOW = frozenset({"If", "Loop", "Scan", "SequenceMap"})


@cache
def schema(op_type: str, version: int) -> onnx.defs.OpSchema | None:
    """Return the schema of a standard operator at an opset, or None if the opset does not have it."""
    try:
        return onnx.defs.get_schema(op_type, version, "")
    except onnx.defs.SchemaError:
        return None


def infer_node(node: ir.Node, info: ShapeInfo, version: int) -> list[tuple[Shape | None, ir.DataType | None]]:
    """Return (shape, dtype) of each output, None for an unknown one; an empty list if ONNX cannot infer the node."""
    definition = schema(node.op_type, version) if node.domain in STANDARD_DOMAINS else None
    if definition is None or node.op_type in CONTROL_FLOW:
        return []
    sizes: dict[str, Dim] = {}
    proto = onnx.NodeProto(op_type=node.op_type)
    types, data = {}, {}
    for index, value in enumerate(node.inputs):
        name = "" if value is None else f"i{index}"
        proto.input.append(name)
        if value is not None:
            types[name] = _type_proto(value, info.shapes.get(value), sizes)
            elements = _element_proto(value, info)
            if elements is not None:
                data[name] = elements
    proto.output.extend(f"o{index}" for index in range(len(node.outputs)))
    opsets = [onnx.helper.make_opsetid("", version)]
    try:
        proto.attribute.extend(ir.serde.serialize_attribute(attribute) for attribute in node.attributes.values())
        inferred = onnx.shape_inference.infer_node_outputs(definition, proto, types, data or None, None, opsets)
    except Exception:  # an unsupported dtype, shape or attribute; ONNX Runtime will report it
        return []
    return [_parse_type(inferred.get(f"o{i}"), output, sizes) for i, output in enumerate(node.outputs)]


def _type_proto(value: ir.Value, shape: Shape | None, sizes: dict[str, Dim]) -> onnx.TypeProto:
    dtype = value.dtype or ir.DataType.FLOAT
    if shape is None:
        return onnx.helper.make_tensor_type_proto(int(dtype), None)
    names = {d: name for name, d in sizes.items()}
    for d in shape:
        if d.value is None:
            sizes[names.setdefault(d, f"s{len(names)}")] = d
    return onnx.helper.make_tensor_type_proto(int(dtype), [names[d] if d.value is None else d.value for d in shape])


def _element_proto(value: ir.Value, info: ShapeInfo) -> onnx.TensorProto | None:
    """Return the elements of a small integer tensor, such as sizes, axes or repeats, or None if unknown."""
    elements, shape = info.known_ints(value), info.shapes.get(value)
    if elements is None or shape is None:
        return None
    dtype = value.dtype or ir.DataType.INT64
    return onnx.numpy_helper.from_array(np.array(elements, dtype.numpy()).reshape([d.value or 0 for d in shape]))


def _parse_type(
    proto: onnx.TypeProto | None, output: ir.Value, sizes: dict[str, Dim]
) -> tuple[Shape | None, ir.DataType | None]:
    if proto is None or not proto.HasField("tensor_type"):
        return None, None
    tensor = proto.tensor_type
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
