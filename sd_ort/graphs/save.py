"""Saving of a graph with its weights in one external data file, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import onnx_ir.passes.common as common

from fusion_passes import CONTRIB, DOMAIN
from sd_ort.core import embedded_weights
from sd_ort.core.package_version import package_version
from sd_ort.graphs import external_data_writer

MAX_SIZES = 1 << 16  # maximum bytes of an int64 tensor that is stored in the model file
MAX_EMBEDDED = 256  # maximum bytes of a weight that is stored in the model file
IR_VERSION = 10  # minimum for opset 21 and overloads of functions; old exporters write lower ones


def fix_names(model: ir.Model) -> None:
    """Remove unused nodes and initializers, and set the final name of every value."""
    common.RemoveUnusedNodesPass()(model)
    common.NameFixPass()(model)


def save(
    model: ir.Model, path: Path, on_tensor: Callable[[], None] = lambda: None, *, embed: bool = False
) -> str | None:
    """Write `path` and its external data file `<path>.data`, one tensor at a time; return the data file's SHA-256.

    Afterwards the model's weights refer to the data file, in which large tensors are aligned. `on_tensor` is called
    before each tensor is written; its exceptions end the writing. With `embed` the weights
    are stored in `path` itself, and None is returned.
    """
    fix_names(model)
    for node in model.graph.all_nodes():
        if node.domain not in (CONTRIB, DOMAIN):
            continue
        # A function's last output keeps its name: serialization drops trailing empty names, ONNX Runtime needs all.
        optional = node.outputs[1:] if node.domain == CONTRIB else node.outputs[1:-1]
        for output in optional:
            if not output.uses() and not output.is_graph_output():
                output.name = ""  # kernels skip optional outputs without a name
    model.ir_version = max(model.ir_version, IR_VERSION)
    model.producer_name, model.producer_version = "sd-ort", package_version("sd-ort")
    path.parent.mkdir(parents=True, exist_ok=True)
    if embed:
        _save_embedded(model, path)
        return None
    values = [value for graph in model.graphs() for value in graph.initializers.values()]
    weights = [(value, tensor) for value in values if (tensor := value.const_value) is not None]
    for value, tensor in weights:
        if _is_embedded(tensor) and isinstance(tensor, ir.ExternalTensor):
            value.const_value = ir.Tensor(tensor.numpy().copy(), dtype=tensor.dtype, name=tensor.name)
    external = [(value, tensor) for value, tensor in weights if not _is_embedded(tensor)]
    stored, digest = external_data_writer.write(
        path.with_name(f"{path.name}.data"), [tensor for _, tensor in external], on_tensor
    )
    for (value, _), tensor in zip(external, stored, strict=True):
        value.const_value = tensor
    ir.save(model, path)
    return digest


def _is_embedded(tensor: ir.TensorProtocol) -> bool:
    """Return whether a tensor is stored in the model file: shape inference reads sizes, which are int64, only there."""
    return tensor.nbytes <= (MAX_SIZES if tensor.dtype == ir.DataType.INT64 else MAX_EMBEDDED)


def _save_embedded(model: ir.Model, path: Path) -> None:
    """Write `path` with its weights, of the main graph one at a time."""
    tensors = []
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is not None and tensor.nbytes > MAX_EMBEDDED:
            tensors.append((value, tensor))
            value.const_value = ir.ExternalTensor(
                "", 0, 0, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=name, base_dir=""
            )
    proto = ir.to_proto(model)
    for value, tensor in tensors:
        value.const_value = tensor
    names = {str(value.name) for value, _ in tensors}
    remaining = [initializer for initializer in proto.graph.initializer if initializer.name not in names]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(remaining)
    embedded_weights.write(path, proto, {str(value.name): tensor for value, tensor in tensors})
