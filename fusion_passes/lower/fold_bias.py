"""Biases of convolutions and linear layers moved into the operator that reads the result, where adding costs nothing.

    NhwcConv(x, w, b) -> SkipGroupNorm(., gamma, beta, skip)  =>  NhwcConv(x, w) -> SkipGroupNorm(..., skip, b)
    NhwcConv(x, w, b) -> GroupNorm(., gamma, beta)            =>  NhwcConv(x, w) -> SkipGroupNorm(..., b per sample)
    NhwcConv(x, w, b) -> GroupNorm, and others                =>  the same; the others read SkipGroupNorm's sum
    NhwcConv(x, w, b) -> Add(., y)                            =>  NhwcConv(x, w) -> BiasAdd(., b, y)
    Add(MatMul(x, w), b) -> Reshape to NHWC -> any of these   =>  MatMul(x, w) -> Reshape -> the same

GPU libraries add a convolution's bias in a kernel of its own (cuDNN's fused ones were slower than both together), and a
MatMul has none, so each costs a launch, a read and a write of the whole feature map. The last form is the linear
projection that ends the transformers of SDXL and SD 2.1. Two results that meet in one SkipGroupNorm or Add (a residual
block's last convolution and its shortcut) hand over the sum of their biases, computed while the model is saved. Left
alone: a result that several read and no GroupNorm, or of which the Add broadcasts. Runs after `nhwc_layout`.
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes import checks as c
from fusion_passes.operators.record import DOMAIN
from fusion_passes.rewriting import constant, derived


def fold_bias(model: ir.Model) -> int:
    """Move biases of NhwcConv nodes, and those behind MatMul, on in place; returns how many."""
    moved = 0
    for node in list(model.graph):
        if node.op_type == "NhwcConv" and len(node.inputs) > 2 and node.inputs[2] is not None:
            if _move(model.graph, node.outputs[0], node.inputs[2]):
                node.resize_inputs(2)
                moved += 1
        elif (found := _linear(node)) is not None:
            product, bias, seen = found
            if _move(model.graph, seen, bias):
                node.outputs[0].replace_all_uses_with(product)
                model.graph.remove(node, safe=True)
                moved += 1
    if moved:
        model.graph.sort()  # what reads a norm's sum may have come before the norm
    return moved


def _linear(add: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value] | None:
    """(product, bias, the Reshape's result) of a Reshape of MatMul + bias that keeps the channels; None of others."""
    users = list(add.outputs[0].uses())
    if add.op_type != "Add" or add.domain != "" or len(users) != 1 or add.outputs[0].is_graph_output():
        return None
    reshape = users[0][0]
    for product, bias in (add.inputs, add.inputs[::-1]):
        made = None if product is None else product.producer()
        if made is not None and made.op_type == "MatMul" and c.is_vector(bias, c.size(product, -1)):
            keeps = reshape.op_type == "Reshape" and c.size(reshape.outputs[0], -1) == c.size(product, -1)
            assert product is not None
            assert bias is not None
            return (product, bias, reshape.outputs[0]) if keeps else None
    return None


def _move(graph: ir.Graph, output: ir.Value, bias: ir.Value) -> bool:
    """Make `bias` of `output`'s last axis part of what reads `output`; whether that could be done."""
    users = list(output.uses())
    if output.is_graph_output() or not c.is_vector(bias, c.size(output, -1)):
        return False
    for reader, index in users:
        if reader.op_type == "GroupNorm" and index == 0:
            _to_skip_group_norm(graph, reader, bias)
            return True
    if len(users) != 1:
        return False
    reader, index = users[0]
    if reader.op_type == "SkipGroupNorm" and index in (0, 3) and c.same_shape(output, reader.inputs[0]):
        _give(graph, reader, 4, bias)
    elif reader.op_type == "BiasAdd" and index in (0, 2):
        _give(graph, reader, 1, bias)
    elif reader.op_type == "Add" and all(c.same_shape(output, value) for value in reader.inputs):
        _to_bias_add(graph, reader, index, bias)
    else:
        return False
    return True


def _give(graph: ir.Graph, reader: ir.Node, index: int, bias: ir.Value) -> None:
    """Make `bias`, plus the one that is there, the reader's input `index`."""
    there = reader.inputs[index] if len(reader.inputs) > index else None
    if there is not None:
        width = c.size(bias, 0)
        assert width is not None
        bias = derived(graph, f"{reader.outputs[0].name}.bias", [there, bias], [width], lambda a, b: a + b)
    if len(reader.inputs) <= index:
        reader.resize_inputs(index + 1)
    reader.replace_input_with(index, bias)


def _to_skip_group_norm(graph: ir.Graph, norm: ir.Node, bias: ir.Value) -> None:
    """GroupNorm(x, ...) => SkipGroupNorm(x, ..., skip), the skip (N, 1, 1, C) a row of biases for each sample.

    What else reads x then reads the sum of x and the biases.
    """
    x, gamma, beta = norm.inputs[:3]
    old, width = norm.outputs[0], c.size(bias, 0)
    assert x is not None
    assert width is not None
    others = [(reader, index) for reader, index in x.uses() if reader is not norm]  # may come before the norm
    name = f"{old.name}.bias"
    row = derived(graph, f"{name}_row", [bias], [1, 1, 1, width], lambda a: a.reshape(1, 1, 1, width))
    batch = ir.node("Shape", [x], {"start": 0, "end": 1})
    shape = ir.node("Concat", [batch.outputs[0], constant(graph, f"{name}_width", [1, 1, width])], {"axis": 0})
    rows = ir.node("Expand", [row, shape.outputs[0]])
    for node, suffix in ((batch, "batch"), (shape, "shape"), (rows, "rows")):
        node.outputs[0].name = f"{name}_{suffix}"
    for node, size in ((batch, 1), (shape, 4)):
        node.outputs[0].type, node.outputs[0].shape = ir.TensorType(ir.DataType.INT64), ir.Shape([size])
    first = None if x.shape is None else x.shape[0]
    rows.outputs[0].type, rows.outputs[0].shape = old.type, ir.Shape([first, 1, 1, width])
    attributes = {key: attribute.value for key, attribute in norm.attributes.items()}
    new = ir.node("SkipGroupNorm", [x, gamma, beta, rows.outputs[0]], attributes, domain=DOMAIN, num_outputs=2)
    new.metadata_props.update(norm.metadata_props)
    made, total = new.outputs
    made.name, made.type, made.shape = old.name, old.type, old.shape
    total.name, total.type, total.shape = f"{name}_sum", old.type, old.shape
    graph.insert_before(norm, [batch, shape, rows, new])
    for reader, index in others:
        reader.replace_input_with(index, total)
    ir.convenience.replace_all_uses_with(old, made, replace_graph_outputs=True)
    graph.remove(norm, safe=True)


def _to_bias_add(graph: ir.Graph, add: ir.Node, index: int, bias: ir.Value) -> None:
    """Add(x, y) => BiasAdd(x, bias, y), under the old output's name."""
    old = add.outputs[0]
    node = ir.node("BiasAdd", [add.inputs[index], bias, add.inputs[1 - index]], domain=DOMAIN)
    node.metadata_props.update(add.metadata_props)
    new = node.outputs[0]
    new.name, new.type, new.shape = old.name, old.type, old.shape
    graph.insert_before(add, node)
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    graph.remove(add, safe=True)
