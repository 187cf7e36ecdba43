"""Function overloads on ONNX Runtime before 1.27, which finds a model-local function by domain and name alone.

There two overloads of one function run the same body, or crash. The bodies of `operators.function_bodies` have
overloads, so a session without the op library gets a graph in which each overload has a function name of its own.
"""

from __future__ import annotations

from pathlib import Path

from sd_ort.core.onnx_file import all_nodes

FIRST_VERSION = (1, 27)  # of ONNX Runtime that tells overloads apart


def supports_overloads(version: str) -> bool:
    """Return whether ONNX Runtime `version` tells overloads of a function apart."""
    return tuple(map(int, version.split(".")[:2])) >= FIRST_VERSION


def without_overloads(source: Path | bytes) -> bytes | None:
    """Return the model serialized with one function name per overload, or None if no function has an overload.

    `source`: an .onnx file, or a serialized model. External data stays where it is.
    """
    import onnx

    data = source if isinstance(source, bytes) else source.read_bytes()
    model = onnx.ModelProto.FromString(data)
    names = {
        (each.domain, each.name, each.overload): f"{each.name}_{each.overload}"
        for each in model.functions
        if each.overload
    }
    if not names:
        return None
    for function in model.functions:
        key = (function.domain, function.name, function.overload)
        function.name, function.overload = names.get(key, function.name), ""
    for nodes in (model.graph.node, *(function.node for function in model.functions)):
        for node in all_nodes(nodes):
            key = (node.domain, node.op_type, node.overload)
            node.op_type, node.overload = names.get(key, node.op_type), ""
    return model.SerializeToString()
