"""Shapes and constants: what is known becomes visible, and chains that only rebuild it disappear.

    Shape -> Gather -> Mul -> ... (all sizes known)    =>  constant
    Reshape(x, computed)                               =>  Reshape(x, constant with 0 and -1)
    Reshape(x, computed), shape of an earlier value v  =>  Reshape(x, Shape(v))
    Unsqueeze(Unsqueeze(x))                            =>  Reshape(x, constant)
    Expand to its own shape, Cast to its own type, Mul/Div by 1, Add of zeros  =>  nothing

Everything is proven on symbolic dimensions (`fusion_passes.shapes`), never on the nodes that computed a shape.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common
import onnxscript.optimizer

from fusion_passes import checks as c
from fusion_passes.canonicalize.round_trips import origin
from fusion_passes.rewriting import constant
from fusion_passes.shapes.dims import Dim
from fusion_passes.shapes.facts import LIST_LIMIT, Facts
from fusion_passes.shapes.infer import annotate, annotate_new
from fusion_passes.tidy import drop_unread, tidy

FOLD_LIMIT = 1 << 16  # bytes: shape arithmetic, masks and frequency tables, never weights


def fold(model: ir.Model) -> None:
    """Apply the rewrites above until nothing changes, then drop what no output needs."""
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    for turn in range(4):
        facts = annotate(model.graph)
        changed = _materialize(model.graph, facts) + _drop_no_ops(model.graph)
        if turn and not changed:
            break  # what follows has done what it can
        onnxscript.optimizer.fold_constants(model, input_size_limit=FOLD_LIMIT, output_size_limit=FOLD_LIMIT)
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        tidy(model)
        merge_equal(model)
        if not changed:
            break
    reshape_targets(model)


def fix_channels(model: ir.Model) -> None:
    """Give inputs the channels that their convolutions demand: old exporters declare this axis dynamic, too."""
    for value in model.graph.inputs:
        channels = c.demanded_channels(value)
        if channels is not None and value.shape is not None and value.shape.rank() > 1:
            value.shape = ir.Shape([channels if axis == 1 else d for axis, d in enumerate(value.shape)])


def merge_equal(model: ir.Model) -> None:
    """One node for all that compute the same from the same: TorchScript builds a causal mask for every layer."""
    common.DeduplicateInitializersPass(size_limit=LIST_LIMIT)(model)
    common.CommonSubexpressionEliminationPass()(model)


def reshape_targets(model: ir.Model) -> None:
    """Give every Reshape a constant target, or the Shape of a value that has it."""
    facts = annotate_new(model.graph)
    seen: dict[tuple[Dim, ...], ir.Value] = {}
    for value in [*model.graph.inputs]:
        seen.setdefault(facts.shapes.get(value, ()), value)
    for node in list(model.graph):
        is_reshape = node.op_type == "Reshape" and node.domain == ""
        allows_zero = node.attributes.get_int("allowzero", 0)
        if is_reshape and (allows_zero or not c.is_constant(node.inputs[1])):
            _retarget(model.graph, node, facts, seen)
        elif node.op_type in ("Unsqueeze", "Squeeze") and node.outputs[0] not in facts.elements:
            _as_reshape(model.graph, node, facts)
        for output in node.outputs:
            # What only a Shape reads would have to be computed for it.
            if facts.shapes.get(output) and (c.readers(output) or output.is_graph_output()):
                seen.setdefault(facts.shapes[output], output)
    tidy(model)
    common.CommonSubexpressionEliminationPass()(model)
    annotate_new(model.graph)


def _materialize(graph: ir.Graph, facts: Facts) -> int:
    """Replace integer values whose elements are all known by constants, and equal ones by the first of them."""
    changed = 0
    first: dict[tuple[int, ir.DataType, tuple[Dim, ...]], ir.Value] = {}
    for node in list(graph):
        output = node.outputs[0]
        shape = facts.shapes.get(output)
        if output not in facts.elements or shape is None or len(shape) > 1 or output.is_graph_output():
            continue
        if not output.uses() or output.dtype not in (ir.DataType.INT64, ir.DataType.INT32):
            continue
        numbers = facts.static(output)
        if numbers is not None:
            array = np.array(numbers, output.dtype.numpy()).reshape([d.value or 0 for d in shape])
            ir.convenience.replace_all_uses_with(output, constant(graph, f"{output.name}.known", array))
            changed += 1
            continue
        same = first.setdefault((len(shape), output.dtype, tuple(facts.elements[output])), output)
        if same is not output:
            ir.convenience.replace_all_uses_with(output, same)
            changed += 1
    return changed


def _drop_no_ops(graph: ir.Graph) -> int:
    """Let users of what changes nothing read the input itself."""
    changed = 0
    for node in list(graph):
        if node.domain or not node.inputs or node.inputs[0] is None:
            continue
        x, y = node.inputs[0], node.outputs[0]
        if node.op_type == "Add" and node.inputs[1] is not None and _is_zeros(x):
            x = node.inputs[1]
        no_op = (
            (node.op_type == "Cast" and x.dtype is not None and node.attributes["to"].as_int() == x.dtype)
            or (node.op_type == "Expand" and c.same_shape(x, y) and not any("?" in str(d) for d in c.dims(x) or []))
            or (node.op_type == "Add" and c.same_shape(x, y) and any(_is_zeros(v) for v in node.inputs if v is not x))
            or (node.op_type == "Dropout" and len(node.outputs) == 1 and len(node.inputs) < 3)
        )
        same = x if no_op else origin(node)
        if same is not None and not y.is_graph_output():
            ir.convenience.replace_all_uses_with(y, same)
            changed += 1
    drop_unread(graph)
    return changed


def _is_zeros(value: ir.Value | None) -> bool:
    """Whether ConstantOfShape made a value of zeros, or a finite multiple of them: torch.baddbmm with beta=0."""
    node = None if value is None else value.producer()
    if node is not None and node.op_type == "Mul":
        factors = [c.scalar(v) for v in node.inputs]
        finite = any(factor is not None and math.isfinite(factor) for factor in factors)
        return finite and any(_is_zeros(v) for v in node.inputs)
    if node is None or node.op_type != "ConstantOfShape":
        return False
    tensor = node.attributes.get_tensor("value")
    return tensor is None or not tensor.numpy().any()


def _retarget(graph: ir.Graph, node: ir.Node, facts: Facts, seen: dict[tuple[Dim, ...], ir.Value]) -> None:
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    before, after = facts.shapes.get(x), facts.shapes.get(y)
    if before is None or after is None or any(dim.value == 0 for dim in after):
        return
    target: list[int] = []
    for axis, dim in enumerate(after):
        same = axis < len(before) and before[axis] == dim
        target.append(dim.value if dim.value is not None else 0 if same else -1)
    if target.count(-1) <= 1:
        shape = constant(graph, f"{y.name}.shape", np.array(target, np.int64))
    elif after in seen:
        shape_node = ir.node("Shape", [seen[after]])
        shape_node.outputs[0].name = f"{y.name}.shape_of"
        shape_node.outputs[0].dtype = ir.DataType.INT64
        graph.insert_before(node, shape_node)
        shape = shape_node.outputs[0]
    else:
        return
    node.replace_input_with(1, shape)
    node.attributes.pop("allowzero", None)


def _as_reshape(graph: ir.Graph, node: ir.Node, facts: Facts) -> None:
    """Spell Squeeze and Unsqueeze of tensors as Reshape, when at most one size is unknown: [N, C] -> [N, C, 1, 1]."""
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    before, after = facts.shapes.get(x), facts.shapes.get(y)
    if before is None or after is None or x.dtype in (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL):
        return
    target = [
        d.value if d.value is not None else 0 if i < len(before) and before[i] == d else -1 for i, d in enumerate(after)
    ]
    if target.count(-1) > 1:
        return
    source = x.producer()
    if source is not None and source.op_type == "Reshape" and len(x.uses()) == 1 and source.inputs[0] is not None:
        outer = facts.shapes.get(source.inputs[0])
        direct = [
            d.value if d.value is not None else 0 if outer and i < len(outer) and outer[i] == d else -1
            for i, d in enumerate(after)
        ]
        if outer is not None and direct.count(-1) <= 1:
            x, target = source.inputs[0], direct
    shape = constant(graph, f"{y.name}.shape", np.array(target, np.int64))
    new = ir.node("Reshape", [x, shape])
    new.metadata_props.update(node.metadata_props)
    new.outputs[0].type, new.outputs[0].shape, new.outputs[0].name = y.type, y.shape, f"{y.name}.reshaped"
    graph.insert_before(node, new)
    if y.is_graph_output():
        return
    ir.convenience.replace_all_uses_with(y, new.outputs[0])
    facts.shapes[new.outputs[0]] = after
