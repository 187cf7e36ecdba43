"""The two graphs of a UNet whose deep features are kept for several steps (DeepCache, Ma et al., 2023).

A UNet's last layers concatenate features from below (deep) with a skip connection from its first layers. The deep
features change little from step to step. A full step computes everything and returns these, too. A shallow step reads
these as an input and computes only the first layers up to the skip connection and the last ones from there.

Branch 0 cuts at the last Concat, branch 1 at the one before, and so on. Both graphs are cut from the optimized one, and
their initializers are the same data of the same file.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir
import onnx_ir.passes.common as common

from fusion_passes import value_queries
from fusion_passes.shapes.infer import annotate
from sd_ort.core.errors import InputError
from sd_ort.core.pipeline_folder import DEEP_FEATURES
from sd_ort.graphs.hoist import all_inputs, input_like


def return_deep_features(model: ir.Model, branch: int) -> None:
    """Add the deep features of a branch to the outputs of a UNet. Raises InputError if there is no such branch."""
    graph = model.graph
    add_output(graph, _deep_value(graph, branch), DEEP_FEATURES)


def keep_shallow_part(model: ir.Model, branch: int) -> None:
    """Reduce a UNet to the layers of a shallow step. Raises InputError if the UNet has no such branch."""
    graph = model.graph
    deep = _deep_value(graph, branch)
    source = replace_by_input(graph, deep, DEEP_FEATURES)
    _move_shapes(graph, source)
    remove_unused_parts(model)


def add_output(graph: ir.Graph, value: ir.Value, name: str) -> None:
    """Add a copy of a value to the outputs under a name; of bfloat16, which Python has not, in float32."""
    copy = ir.node("Cast" if value.dtype == ir.DataType.BFLOAT16 else "Identity", [value])
    if copy.op_type == "Cast":
        copy.attributes["to"] = ir.AttrInt64("to", ir.DataType.FLOAT)
    output = copy.outputs[0]
    output.name, output.shape = name, value.shape
    output.type = ir.TensorType(ir.DataType.FLOAT) if copy.op_type == "Cast" else value.type
    graph.append(copy)
    graph.outputs.append(output)


def replace_by_input(graph: ir.Graph, value: ir.Value, name: str) -> ir.Value:
    """Replace a value by a new graph input, with a Cast if it is bfloat16; return the value that its consumers read."""
    source = add_input(graph, value, name)
    ir.convenience.replace_all_uses_with(value, source)
    return source


def add_input(graph: ir.Graph, like: ir.Value, name: str) -> ir.Value:
    """Add an input of the type and shape of a value, in bfloat16 as float32, and return it in the type of the value."""
    source = graph_input = input_like(like)
    graph_input.name = name
    graph.inputs.append(graph_input)
    if like.dtype == ir.DataType.BFLOAT16:
        graph_input.type = ir.TensorType(ir.DataType.FLOAT)
        cast = ir.node("Cast", [graph_input], {"to": ir.DataType.BFLOAT16})
        source = cast.outputs[0]
        source.name, source.type, source.shape = f"{name}.bfloat16", like.type, like.shape
        graph.insert_before(graph[0], cast)
    return source


def remove_unused_parts(model: ir.Model) -> None:
    """Remove nodes, functions and graph inputs that no output of the graph depends on, and sort the other nodes."""
    graph = model.graph
    graph.sort()
    common.RemoveUnusedNodesPass()(model)
    common.RemoveUnusedFunctionsPass()(model)
    for value in [value for value in graph.inputs if not value.uses() and not value.is_graph_output()]:
        graph.inputs.remove(value)


def _deep_value(graph: ir.Graph, branch: int) -> ir.Value:
    """Return the deep operand of the Concat of a branch."""
    concats = _image_concats(graph)
    if not concats:  # graphs of exporters may have no shapes
        annotate(graph)
        concats = _image_concats(graph)
    if branch >= len(concats):
        raise InputError(f"cache_branch_id {branch}: this UNet's graph has {len(concats)} skip connections to cut at.")
    deep, skip = (value_queries.operand(concats[-1 - branch], index) for index in (0, 1))
    if len(_ancestors([deep])) < len(_ancestors([skip])):
        deep, skip = skip, deep
    if deep.producer() is None or deep.is_graph_input():
        raise InputError(f"cache_branch_id {branch}: this UNet's graph has no deep features there.")
    return deep


def _image_concats(graph: ir.Graph) -> list[ir.Node]:
    """Return the nodes that concatenate two images, in order."""
    pairs = (node for node in graph if node.op_type == "Concat" and len(node.inputs) == 2)
    return [node for node in pairs if value_queries.rank(node.outputs[0]) == 4]


def _ancestors(values: Iterable[ir.Value], through_shapes: bool = True) -> dict[ir.Value, None]:
    """Return `values` and all values that these are computed from. Without `through_shapes`, a Shape has no source."""
    ancestors = dict.fromkeys(values)
    queue = list(ancestors)
    for value in queue:  # the list grows
        producer = value.producer()
        if producer is None or (producer.op_type == "Shape" and not through_shapes):
            continue
        for operand in all_inputs(producer):
            if operand not in ancestors:
                ancestors[operand] = None
                queue.append(operand)
    return ancestors


def _move_shapes(graph: ir.Graph, features: ir.Value) -> None:
    """Let Shapes of deep values read values of the same shape that a shallow step computes anyway.

    A Shape without such a value stays, with the nodes that compute its source.
    """
    live = _ancestors(graph.outputs, through_shapes=False)
    shapes = [node for node in graph if node.op_type == "Shape" and node.outputs[0] in live]
    for node in shapes:
        source = node.inputs[0]
        if source is None or source in live:
            continue
        equal = (value for value in (features, *live) if _same_shape(value, source))
        other = next((value for value in equal if node.outputs[0] not in _ancestors([value])), None)
        if other is not None:
            node.replace_input_with(0, other)


def _same_shape(one: ir.Value, other: ir.Value) -> bool:
    if one.shape is None or other.shape is None or len(one.shape) != len(other.shape):
        return False
    return all(a == b and a != ir.SymbolicDim(None) for a, b in zip(one.shape, other.shape, strict=True))
