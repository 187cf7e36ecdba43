"""Folding of shape arithmetic and removal of no-ops.

    Shape -> Gather -> Mul -> ... (all sizes known)    =>  constant
    Reshape(x, computed)                               =>  Reshape(x, constant with 0 and -1)
    Reshape(x, computed), shape of an earlier value v  =>  Reshape(x, Shape(v))
    Unsqueeze(Unsqueeze(x))                            =>  Reshape(x, constant)
    Expand to its own shape, Cast to its own dtype, Mul/Div by 1, Add of zeros  =>  removed

All proofs use symbolic dimensions (`fusion_passes.shapes`), never the nodes that compute a shape.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common
import onnxscript.optimizer

from fusion_passes import value_queries as values
from fusion_passes.canonicalize.inverse_pairs import equivalent_input
from fusion_passes.cleanup import clean_up, remove_unused
from fusion_passes.graph_edits import new_initializer
from fusion_passes.shapes.dims import Dim
from fusion_passes.shapes.infer import annotate, annotate_new
from fusion_passes.shapes.shape_info import LIST_LIMIT, Shape, ShapeInfo

FOLD_LIMIT = 1 << 16  # bytes: shape arithmetic, masks and frequency tables, never weights
# Operators whose output size depends on the values of their inputs; they are folded only if shapes prove it small.
UNBOUNDED = frozenset("ConstantOfShape Expand OneHot Pad Range Resize Tile Upsample".split())


def fold_shapes(model: ir.Model) -> None:
    """Apply the rewrites above until nothing changes, then remove unused nodes."""
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    for iteration in range(4):
        info = annotate(model.graph)
        changed = _materialize(model.graph, info) + remove_no_ops(model.graph)
        if iteration and not changed:
            break  # the steps below cannot change anything either
        onnxscript.optimizer.fold_constants(
            model, input_size_limit=FOLD_LIMIT, output_size_limit=FOLD_LIMIT, should_fold=partial(_may_fold, info)
        )
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        clean_up(model)
        merge_duplicates(model)
        if not changed:
            break
    simplify_reshape_targets(model)


def _may_fold(info: ShapeInfo, node: ir.Node) -> bool | None:
    """Return False if the outputs of a node may exceed `FOLD_LIMIT`: a few bytes of inputs can describe gigabytes."""
    for output in node.outputs:
        shape = info.shapes.get(output)
        if shape is None or any(d.value is None for d in shape):
            if node.op_type in UNBOUNDED:
                return False
        elif math.prod(d.value or 0 for d in shape) > FOLD_LIMIT:
            return False
    return None


def set_channel_counts(model: ir.Model) -> None:
    """Set the channel axis of graph inputs to the size that their Conv requires; old exporters declare it dynamic."""
    for value in model.graph.inputs:
        channels = values.required_channels(value)
        if channels is not None and value.shape is not None and value.shape.rank() > 1:
            value.shape = ir.Shape([channels if axis == 1 else d for axis, d in enumerate(value.shape)])


def merge_duplicates(model: ir.Model) -> None:
    """Merge equal initializers and common subexpressions: TorchScript builds a causal mask for every layer."""
    common.DeduplicateInitializersPass(size_limit=LIST_LIMIT)(model)
    common.CommonSubexpressionEliminationPass()(model)


def simplify_reshape_targets(model: ir.Model) -> None:
    """Replace the target of every Reshape by a constant, or by the Shape of a value with the same shape."""
    info = annotate_new(model.graph)
    by_shape: dict[tuple[Dim, ...], ir.Value] = {}
    for value in [*model.graph.inputs]:
        by_shape.setdefault(info.shapes.get(value, ()), value)
    for node in list(model.graph):
        is_reshape = node.op_type == "Reshape" and node.domain == ""
        allows_zero = node.attributes.get_int("allowzero", 0)
        if is_reshape and (allows_zero or not values.is_constant(node.inputs[1])):
            _simplify_target(model.graph, node, info, by_shape)
        elif node.op_type in ("Unsqueeze", "Squeeze") and node.outputs[0] not in info.elements:
            _replace_by_reshape(model.graph, node, info)
        for output in node.outputs:
            # A value that only Shape nodes consume would be computed just for its shape.
            if info.shapes.get(output) and (values.data_consumers(output) or output.is_graph_output()):
                by_shape.setdefault(info.shapes[output], output)
    clean_up(model)
    common.CommonSubexpressionEliminationPass()(model)
    annotate_new(model.graph)


def _materialize(graph: ir.Graph, info: ShapeInfo) -> int:
    """Replace integer values with known elements by constants, and values with equal elements by the first of them."""
    changed = 0
    first: dict[tuple[int, ir.DataType, tuple[Dim, ...]], ir.Value] = {}
    for node in list(graph):
        output = node.outputs[0]
        shape = info.shapes.get(output)
        if output not in info.elements or shape is None or len(shape) > 1 or output.is_graph_output():
            continue
        if not output.uses() or output.dtype not in (ir.DataType.INT64, ir.DataType.INT32):
            continue
        elements = info.known_ints(output)
        if elements is not None:
            array = np.array(elements, output.dtype.numpy()).reshape([d.value or 0 for d in shape])
            ir.convenience.replace_all_uses_with(output, new_initializer(graph, f"{output.name}.known", array))
            changed += 1
            continue
        same = first.setdefault((len(shape), output.dtype, tuple(info.elements[output])), output)
        if same is not output:
            ir.convenience.replace_all_uses_with(output, same)
            changed += 1
    return changed


def remove_no_ops(graph: ir.Graph) -> int:
    """Replace the outputs of no-ops by their inputs; return the number of no-ops."""
    changed = 0
    for node in list(graph):
        if node.domain or not node.inputs or node.inputs[0] is None:
            continue
        x, y = node.inputs[0], node.outputs[0]
        no_op = (
            (node.op_type == "Cast" and x.dtype is not None and node.attributes["to"].as_int() == x.dtype)
            or (
                node.op_type == "Expand"
                and values.same_shape(x, y)
                and not any("?" in str(d) for d in values.dims(x) or [])
            )
            or (node.op_type == "Dropout" and len(node.outputs) == 1 and len(node.inputs) < 3)
        )
        same = x if no_op else equivalent_input(node)
        if same is not None and not y.is_graph_output():
            ir.convenience.replace_all_uses_with(y, same)
            changed += 1
    remove_unused(graph)
    return changed


def _reshape_target(before: Shape, after: Shape) -> list[int]:
    """Return a Reshape target for `after`: 0 for a symbolic size at its position in `before`, -1 for other ones."""
    copied = [axis < len(before) and before[axis] == dim for axis, dim in enumerate(after)]
    return [d.value if d.value is not None else 0 if copy else -1 for d, copy in zip(after, copied, strict=True)]


def _simplify_target(
    graph: ir.Graph, node: ir.Node, info: ShapeInfo, by_shape: dict[tuple[Dim, ...], ir.Value]
) -> None:
    x, y = values.operand(node, 0), node.outputs[0]
    before, after = info.shapes.get(x), info.shapes.get(y)
    if before is None or after is None or any(dim.value == 0 for dim in after):
        return
    target = _reshape_target(before, after)
    if target.count(-1) <= 1:
        shape = new_initializer(graph, f"{y.name}.shape", np.array(target, np.int64))
    elif after in by_shape:
        shape_node = ir.node("Shape", [by_shape[after]])
        shape_node.outputs[0].name = f"{y.name}.shape_of"
        shape_node.outputs[0].dtype = ir.DataType.INT64
        graph.insert_before(node, shape_node)
        shape = shape_node.outputs[0]
    else:
        return
    node.replace_input_with(1, shape)
    node.attributes.pop("allowzero", None)


def _replace_by_reshape(graph: ir.Graph, node: ir.Node, info: ShapeInfo) -> None:
    """Replace a Squeeze or Unsqueeze by a Reshape if at most one size is unknown: [N, C] -> [N, C, 1, 1]."""
    x, y = values.operand(node, 0), node.outputs[0]
    before, after = info.shapes.get(x), info.shapes.get(y)
    if before is None or after is None or x.dtype in (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL):
        return
    target = _reshape_target(before, after)
    if target.count(-1) > 1:
        return
    source = x.producer()
    if source is not None and source.op_type == "Reshape" and len(x.uses()) == 1 and source.inputs[0] is not None:
        outer = info.shapes.get(source.inputs[0])
        if outer is not None and (direct := _reshape_target(outer, after)).count(-1) <= 1:
            x, target = source.inputs[0], direct
    shape = new_initializer(graph, f"{y.name}.shape", np.array(target, np.int64))
    new = ir.node("Reshape", [x, shape])
    new.metadata_props.update(node.metadata_props)
    new.outputs[0].type, new.outputs[0].shape, new.outputs[0].name = y.type, y.shape, f"{y.name}.reshaped"
    graph.insert_before(node, new)
    if y.is_graph_output():
        return
    ir.convenience.replace_all_uses_with(y, new.outputs[0])
    info.shapes[new.outputs[0]] = after
