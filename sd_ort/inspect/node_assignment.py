"""Which provider runs each node of a component, and why some are left to others: from ONNX Runtime's own assignment for
providers of ours, from the table of its kernels for `rocm`."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fusion_passes.shapes.types import opset
from sd_ort.core.errors import ProviderError
from sd_ort.graphs.load import load
from sd_ort.graphs.scopes import scope
from sd_ort.runtime.provider_table import CPU_EP, OURS, PROVIDERS
from sd_ort.runtime.providers import is_plugin, plugin_library, provider_named
from sd_ort.runtime.rocm_kernels import unsupported_reason
from sd_ort.runtime.session import create_session


def placement(models: Sequence[Path], provider: str) -> dict[str, Any]:
    """Open the graphs with one of our providers, or look them up for `rocm`: {"provider", "nodes": {execution
    provider: number of nodes}, "left": [{"op", "scope", "node", "reason"}] of nodes that others run}.

    Shape arithmetic is left to the CPU, where what it computes is read; nodes that ONNX Runtime computed once and for
    all, or made of others, are no longer those of the file. Raises ProviderError for a provider that is not ours or
    cannot be used here, InputError for a model that it refuses.
    """
    if provider == "rocm":
        return _by_table(models)
    if not is_plugin(provider) or provider_named(provider).ep not in OURS:
        raise ProviderError(
            f"{provider} does not say why it leaves a node: give hip, sdcuda, rocm, or plugin:PATH of ours."
        )
    nodes: Counter[str] = Counter()
    left: list[dict[str, Any]] = []
    for model in models:
        session = create_session(model, provider, assigned=True)
        reasons, scopes = _reasons(plugin_library(provider)), {node.name: scope(node) for node in load(model).graph}
        for part in session.get_provider_graph_assignment_info():
            nodes[part.ep_name] += len(part.get_nodes())
            if part.ep_name in OURS:
                continue
            for node in part.get_nodes():
                reason = reasons.get((node.op_type, node.name), "ONNX Runtime made it, behind the provider's choice")
                left.append(
                    {"op": node.op_type, "scope": scopes.get(node.name, ""), "node": node.name, "reason": reason}
                )
    return {"provider": provider, "nodes": dict(nodes.most_common()), "left": left}


def _by_table(models: Sequence[Path]) -> dict[str, Any]:
    """The placement of graphs as they are, by `runtime.rocm_kernels`. Nodes of `sd_ort` count as run by ROCm, where the
    op library has kernels for them. ONNX Runtime may leave more to the CPU: shape arithmetic, and element types."""
    nodes: Counter[str] = Counter()
    left: list[dict[str, Any]] = []
    for model in models:
        graph = load(model).graph
        for node in graph:
            reason = unsupported_reason(node.domain, node.op_type, opset(graph))
            nodes[PROVIDERS["rocm"].ep if reason is None else CPU_EP] += 1
            if reason is not None:
                left.append({"op": node.op_type, "scope": scope(node), "node": node.name or "", "reason": reason})
    return {"provider": "rocm", "nodes": dict(nodes.most_common()), "left": left}


def _reasons(library: Path) -> dict[tuple[str, str], str]:
    """Of the session that this thread just opened: (operator, node) -> reason."""
    say = ctypes.CDLL(str(library)).sd_ort_unassigned_nodes
    say.restype = ctypes.c_char_p
    lines = [line.split("\t") for line in say().decode("utf-8", "replace").splitlines()]
    return {(op, node): reason for op, node, reason in lines}
