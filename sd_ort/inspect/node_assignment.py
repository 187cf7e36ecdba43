"""Assignment of a component's nodes to execution providers, with the reason for each node that another provider runs.

The sd-ort provider reports its reasons through ONNX Runtime's assignment; those for `rocm` come from its kernel table.
"""

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
from sd_ort.runtime.session import SessionOptions, create_session


def assign_nodes(models: Sequence[Path], provider: str) -> dict[str, Any]:
    """Return {"provider", "nodes": node counts by execution provider, "unassigned_nodes": [op, scope, node, reason]}.

    The graphs are opened with the sd-ort provider, or looked up in the kernel table for `rocm`. Shape arithmetic stays
    on the CPU, where its results are read. Nodes that ONNX Runtime folded or replaced are not those of the file. For
    `rocm`, nodes of domain `sd_ort` count as assigned, because the op library has kernels for them; ONNX Runtime may
    leave more nodes to the CPU: shape arithmetic, and dtypes.

    Raises:
        ProviderError: for other providers, and if the provider cannot be used.
        InputError: for a model that it rejects.
    """
    nodes: Counter[str] = Counter()
    unassigned: list[dict[str, Any]] = []
    ours = is_plugin(provider) and provider_named(provider).ep in OURS
    if provider != "rocm" and not ours:
        raise ProviderError(
            f"{provider} does not say why it leaves a node: give hip, sdcuda, rocm, or plugin:PATH of ours."
        )
    for model in models:
        graph = load(model).graph
        if not ours:
            for node in graph:
                reason = unsupported_reason(node.domain, node.op_type, opset(graph))
                nodes[PROVIDERS["rocm"].ep if reason is None else CPU_EP] += 1
                if reason is not None:
                    entry = {"op": node.op_type, "scope": scope(node), "node": node.name or "", "reason": reason}
                    unassigned.append(entry)
            continue
        session = create_session(model, provider, SessionOptions(record_assignment=True))
        reasons, scopes = _reasons(plugin_library(provider)), {node.name: scope(node) for node in graph}
        for part in session.get_provider_graph_assignment_info():
            nodes[part.ep_name] += len(part.get_nodes())
            for node in part.get_nodes() if part.ep_name not in OURS else ():
                reason = reasons.get((node.op_type, node.name), "ONNX Runtime made it, behind the provider's choice")
                entry = {"op": node.op_type, "scope": scopes.get(node.name, ""), "node": node.name, "reason": reason}
                unassigned.append(entry)
    return {"provider": provider, "nodes": dict(nodes.most_common()), "unassigned_nodes": unassigned}


def _reasons(library: Path) -> dict[tuple[str, str], str]:
    """Return the reason for each unassigned (operator, node) of the session that this thread opened last."""
    list_unassigned = ctypes.CDLL(str(library)).sd_ort_unassigned_nodes
    list_unassigned.restype = ctypes.c_char_p
    lines = [line.split("\t") for line in list_unassigned().decode("utf-8", "replace").splitlines()]
    return {(op, node): reason for op, node, reason in lines}
