"""A graph with its weights in one external file, written a tensor at a time."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import onnx_ir.passes.common as common

from fusion_passes import CONTRIB, DOMAIN

IR_VERSION = 10  # what canonical opset 21 and functions with overloads need; folders of old exporters have less


def save(model: ir.Model, path: Path, before_each: Callable[[], None] = lambda: None, *, embed: bool = False) -> None:
    """Write `path` and one external data file beside it, a tensor at a time; offsets of large tensors are aligned.

    `before_each` is called before a tensor is written; what it raises ends the writing. `embed`: put the weights, which
    must not lie in files now, into `path` itself.
    """
    common.RemoveUnusedNodesPass()(model)
    common.NameFixPass()(model)
    for node in model.graph.all_nodes():
        if node.domain not in (CONTRIB, DOMAIN):
            continue
        # A function's last output stays, since serialization would cut it off and ONNX Runtime miss it.
        optional = node.outputs[1:] if node.domain == CONTRIB else node.outputs[1:-1]
        for output in optional:
            if not output.uses() and not output.is_graph_output():
                output.name = ""  # an optional output that nobody reads need not be computed
    model.ir_version = max(model.ir_version, IR_VERSION)
    model.producer_name, model.producer_version = "sd-ort", importlib.metadata.version("sd-ort")
    path.parent.mkdir(parents=True, exist_ok=True)
    if embed:
        ir.save(model, path)
        return
    ir.save(
        model,
        path,
        external_data=f"{path.name}.data",
        alignment=65536,
        max_workers=2,
        max_in_flight_bytes=128 << 20,
        callback=lambda tensor, info: before_each(),
    )
