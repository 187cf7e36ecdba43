"""A graph with its weights in one external file, written a tensor at a time."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import onnx_ir.passes.common as common

from fusion_passes import CONTRIB, DOMAIN
from sd_ort.graphs import data_file

INSIDE = 256  # bytes of a weight that stays in the graph's own file
IR_VERSION = 10  # what canonical opset 21 and functions with overloads need; folders of old exporters have less


def save(
    model: ir.Model, path: Path, before_each: Callable[[], None] = lambda: None, *, embed: bool = False
) -> str | None:
    """Write `path` and one external data file beside it, a tensor at a time; offsets of large tensors are aligned.

    The model's weights are then those in the file. Returns that file's SHA-256, None with `embed`. `before_each` is
    called before a tensor is written; what it raises ends the writing. `embed`: put the weights, which must not lie in
    files now, into `path` itself.
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
        return None
    values = [value for graph in model.graphs() for value in graph.initializers.values()]
    weights = [(value, tensor) for value in values if (tensor := value.const_value) is not None]
    for value, tensor in weights:
        if tensor.nbytes <= INSIDE and isinstance(tensor, ir.ExternalTensor):
            value.const_value = ir.Tensor(tensor.numpy().copy(), dtype=tensor.dtype, name=tensor.name)
    outside = [(value, tensor) for value, tensor in weights if tensor.nbytes > INSIDE]
    stored, digest = data_file.write(
        path.with_name(f"{path.name}.data"), [tensor for _, tensor in outside], before_each
    )
    for (value, _), tensor in zip(outside, stored, strict=True):
        value.const_value = tensor
    ir.save(model, path)
    return digest
