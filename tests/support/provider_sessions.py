"""Sessions on the sd-ort provider with the settings that its tests need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnxruntime as ort
from onnx import TensorProto, helper

from sd_ort.runtime.providers import plugin_devices


def session_of(
    model: Path | bytes, provider: str, options: Mapping[str, str] | None = None, profile: Path | None = None
) -> ort.InferenceSession:
    settings = ort.SessionOptions()
    settings.log_severity_level = 4
    settings.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if profile is not None:
        settings.enable_profiling, settings.profile_file_prefix = True, str(profile)
    settings.add_provider_for_devices(plugin_devices(Path(provider.removeprefix("plugin:"))), dict(options or {}))
    settings.enable_mem_pattern = settings.enable_mem_reuse = False  # as sessions of the package
    return ort.InferenceSession(model if isinstance(model, bytes) else str(model), settings, enable_fallback=0)


def assigned_operators(session: ort.InferenceSession) -> dict[str, Counter[str]]:
    """Return the operators that ONNX Runtime assigned to each provider."""
    nodes: dict[str, Counter[str]] = {}
    for part in session.get_provider_graph_assignment_info():
        nodes.setdefault(part.ep_name, Counter()).update(node.op_type for node in part.get_nodes())
    return nodes


def single_node_model(op_type: str, **attributes: Any) -> bytes:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, "n"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([helper.make_node(op_type, ["x"], ["y"], **attributes)], "small", [x], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10).SerializeToString()
