"""Dtypes of com.microsoft operators, from the schemas of the installed ONNX Runtime."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import onnx_ir as ir

from fusion_passes import CONTRIB
from sd_ort.runtime.ort_wheel import import_onnxruntime


def operator_takes(node: ir.Node, half: ir.DataType) -> bool:
    """Return whether a com.microsoft operator takes its float32 inputs in `half`; True for an unknown operator."""
    schema = _schemas().get(node.op_type)
    if schema is None:
        return True
    allowed = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
    half_type = f"tensor({half.name.lower()})"
    return all(
        half_type in allowed.get(kind, [kind])
        for index, value in enumerate(node.inputs)
        if value is not None and value.dtype == ir.DataType.FLOAT
        for kind in [schema.inputs[min(index, len(schema.inputs) - 1)].typeStr]
    )


def declare_float32_outputs(node: ir.Node) -> None:
    """Set the dtype of the outputs that are float32 by a com.microsoft operator's schema and have none yet."""
    schema = _schemas().get(node.op_type)
    if schema is None:
        return
    allowed = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
    for index, output in enumerate(node.outputs):
        kind = schema.outputs[min(index, len(schema.outputs) - 1)].typeStr
        if output.dtype is None and list(allowed.get(kind, [kind])) == ["tensor(float)"]:
            output.dtype = ir.DataType.FLOAT


@cache
def _schemas() -> dict[str, Any]:
    if importlib.util.find_spec("onnxruntime") is None:
        return {}
    import_onnxruntime()
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

    return {schema.name: schema for schema in get_all_operator_schema() if schema.domain == CONTRIB}
