"""Extraction of a subgraph of a component into a model of its own, for bug reports, with onnx-graphsurgeon."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sd_ort.core import onnx_file, pipeline_folder
from sd_ort.core.errors import InputError, OutputError
from sd_ort.runtime.session import report_invalid_model

if TYPE_CHECKING:
    import onnx
    import onnx_graphsurgeon as gs

EMBEDDED_LIMIT = 1 << 30  # bytes of weights; a protobuf holds at most 2 GiB


def extract(path: Path, component: str, start: Sequence[str], end: Sequence[str], output: Path) -> dict[str, int]:
    """Write the nodes between the values `start` and `end` of a component to `output`; return counts and weight bytes.

    Args:
        path: pipeline folder.
        start: inputs of the new model; graph inputs that the nodes need stay inputs.
        end: outputs of the new model.
        output: .onnx file, with weights up to EMBEDDED_LIMIT; more weights are stored as external data.

    Returns:
        {"nodes", "inputs", "weights", "bytes"}.

    Raises:
        InputError: for an unknown component or value (similar names are listed), or values in the wrong order.
        OutputError: if the file exists or cannot be written.
    """
    import onnx

    pipeline_folder.select_components(path, [component])
    if output.suffix != ".onnx":
        raise OutputError(f"{output} is no name of an ONNX file: give one that ends in .onnx.")
    if output.exists():
        raise OutputError(f"{output} exists: remove it or choose another name.")
    model_path = pipeline_folder.check_component(path, component)
    model = onnx_file.read(model_path)
    with report_invalid_model(model_path):
        cut = _cut(model, start, end)
    _copy_functions(model, cut)
    for tensor in cut.graph.initializer:
        onnx_file.embed(tensor)
    weights = sum(tensor.ByteSize() for tensor in cut.graph.initializer)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(
            cut,
            output,
            save_as_external_data=weights > EMBEDDED_LIMIT,
            location=f"{output.name}.data",
            convert_attribute=False,
        )
    except OSError as error:
        output.unlink(missing_ok=True)
        raise OutputError(f"{output} cannot be written: {error.strerror}.") from error
    sizes = {"nodes": cut.graph.node, "inputs": cut.graph.input, "weights": cut.graph.initializer}
    return {name: len(values) for name, values in sizes.items()} | {"bytes": weights}


def _cut(model: onnx.ModelProto, start: Sequence[str], end: Sequence[str]) -> onnx.ModelProto:
    import onnx_graphsurgeon as gs
    import onnx_ir as ir

    from fusion_passes.shapes.infer import annotate

    graph = gs.import_onnx(model)
    tensors = graph.tensors()
    inputs, outputs = ([_find(tensors, name) for name in names] for names in (start, end))
    for tensor in inputs:
        if isinstance(tensor, gs.Constant):
            raise InputError(f"{tensor.name} is a weight, which comes along by itself: leave it out of --from.")
        tensor.inputs.clear()
    graph.outputs = outputs
    needed = _needed(outputs)
    unused = [tensor.name for tensor in inputs if tensor.name not in needed]
    if unused:
        raise InputError(f"{', '.join(end)} does not depend on {', '.join(unused)}: give values in the graph's order.")
    graph.inputs = inputs + [t for t in graph.inputs if t.name in needed and t not in inputs]
    graph.cleanup().toposort()
    annotated = ir.from_proto(model).graph
    annotate(annotated)  # the TorchScript exporter writes no types
    values = {value.name: value for node in annotated for value in node.outputs}
    for tensor in [*graph.inputs, *graph.outputs]:
        value = values.get(tensor.name)
        if tensor.dtype is None and value is not None and value.dtype is not None:
            tensor.dtype = value.dtype.numpy()
            tensor.shape = None if value.shape is None else [d if isinstance(d, int) else d.value for d in value.shape]
        if tensor.dtype is None:
            raise InputError(f"the type of {tensor.name} is not in the model: choose a value next to it.")
    return gs.export_onnx(graph)


def _find(tensors: dict[str, gs.Tensor], name: str) -> gs.Tensor:
    if name in tensors:
        return tensors[name]
    close = difflib.get_close_matches(name, tensors, n=3, cutoff=0.4)
    raise InputError(f"there is no value {name!r}{': did you mean ' + ' or '.join(close) if close else ''}?")


def _needed(outputs: Sequence[gs.Tensor]) -> set[str]:
    """Return the names of the values that `outputs` depend on."""
    names: set[str] = set()
    stack = list(outputs)
    while stack:
        tensor = stack.pop()
        if tensor.name not in names:
            names.add(tensor.name)
            stack += [source for node in tensor.inputs for source in node.inputs]
    return names


def _copy_functions(model: onnx.ModelProto, cut: onnx.ModelProto) -> None:
    """Copy the functions that the nodes of `cut` call, and the nodes' overloads, which graphsurgeon drops."""
    overloads = {output: node.overload for node in model.graph.node for output in node.output if output}
    called = set()
    for node in cut.graph.node:
        node.overload = next((overloads[output] for output in node.output if output in overloads), "")
        called.add((node.domain, node.op_type, node.overload))
    del cut.functions[:]
    cut.functions.extend(f for f in model.functions if (f.domain, f.name, f.overload) in called)
    del cut.opset_import[:]
    cut.opset_import.extend(model.opset_import)
    cut.ir_version = model.ir_version
