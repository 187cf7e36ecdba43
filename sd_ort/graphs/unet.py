"""Two properties of a UNet graph: the shape of its timestep, and the image sizes that its upsampling supports.

The timestep has shape [] in Optimum's exports, [1] in sd-ort's, and [rows] in a hoisted time graph.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from fusion_passes import DOMAIN, value_queries
from fusion_passes.graph_edits import new_initializer
from fusion_passes.operators import function_bodies
from sd_ort.core.errors import InputError

TIMESTEP = "timestep"
# Operators between a Shape and the sizes of a Resize that do not change a size.
SIZE_FORWARDING_OPS = ("Cast", "Concat", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Unsqueeze")
UPSAMPLING_OPS = ("Upsample", "UpsampleNearest", "SubpixelShuffle", "Resize")


def make_timestep_1d(model: ir.Model) -> bool:
    """Change a timestep of shape [] to [1] without changing the results; return whether it has one axis afterwards.

    In exports of diffusers' UNets the only consumers of the scalar, possibly after a Cast, are Unsqueeze, Reshape or
    Expand to one axis. Unsqueeze and Reshape are removed. With other consumers the graph stays unchanged.
    """
    timestep = next((value for value in model.graph.inputs if value.name == TIMESTEP), None)
    if timestep is None or timestep.shape is None:
        return False
    if len(timestep.shape):
        return True
    scalars, reshapes = [timestep], []
    for value in scalars:  # the list grows
        for node in value_queries.consumers(value):
            if node.op_type in ("Cast", "Identity"):
                scalars.append(node.outputs[0])
            elif node.op_type in ("Unsqueeze", "Reshape", "Expand") and _adds_one_axis(node):
                reshapes.append(node)
            else:
                return False
    if any(value.is_graph_output() for value in scalars):
        return False
    for value in scalars:
        value.shape = ir.Shape([1])
    for node in reshapes:
        if node.op_type != "Expand" and node.inputs[0] is not None:
            ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[0])
            model.graph.remove(node, safe=True)
    return True


def _adds_one_axis(node: ir.Node) -> bool:
    """Return whether a node converts a scalar to one axis. Below opset 13 the axes are an attribute."""
    if len(node.inputs) == 1:
        return len(node.attributes.get_ints("axes") or ()) == 1
    axes = value_queries.ints(node.inputs[1])
    return value_queries.size(node.inputs[1], 0) == 1 if axes is None else len(axes) == 1


def requires_even_sizes(model: ir.Model) -> bool:
    """Return whether a graph upsamples by fixed or computed factors instead of to the sizes of other values.

    diffusers' UNets upsample to other values' sizes if a size does not halve evenly at every level (`upsample_size`).
    Exporters trace only one of the two. A graph with factors runs at even sizes only.
    """
    return any(node.op_type in UPSAMPLING_OPS and not _has_sizes_of_values(node) for node in model.graph)


def _has_sizes_of_values(node: ir.Node) -> bool:
    """Return whether a node is a Resize whose sizes are constants and elements of Shapes, at least one of a Shape."""
    sizes = node.inputs[3] if node.op_type == "Resize" and len(node.inputs) > 3 else None
    if sizes is None or value_queries.is_constant(sizes):
        return False
    operands, has_shape = [sizes], False
    for value in operands:  # the list grows
        producer = value.producer()
        if value_queries.is_constant(value) or producer is None:
            continue
        if producer.op_type == "Shape":
            has_shape = True
        elif producer.op_type in SIZE_FORWARDING_OPS:
            operands += [operand for operand in producer.inputs if operand is not None]
        else:
            return False
    return has_shape


def crop_upsampling(model: ir.Model) -> None:
    """Let a UNet graph that doubles its images run at sizes that do not halve evenly.

    There diffusers interpolates to the size of the skip connection (`upsample_size`). The nearest pixel of row i of
    2k - 1 is i // 2, as in a doubled image, so the doubled image is cropped to the size of the skip connection that
    the result is concatenated with. Even sizes are not changed. Convolutions that `subpixel_conv` merged with the
    doubling become 3x3 again, because the last row of their image differs.

    Raises:
        InputError: if an upsampled image is not concatenated with a skip connection.
    """
    graph = model.graph
    for node in list(graph):
        if node.op_type not in UPSAMPLING_OPS or _has_sizes_of_values(node):
            continue
        concat = _next_concat(node.outputs[0])
        if concat is None:
            raise InputError("this UNet's graph doubles images that no skip connection follows.")
        axis, upsampled = concat
        skip = next(value for value in axis.inputs if value is not upsampled)
        assert skip is not None
        first = 2 if axis.attributes["axis"].as_int() in (1, -3) else 1
        image = _separate_upsampling(graph, node) if node.op_type == "SubpixelShuffle" else node.outputs[0]
        _crop(graph, image, skip, first)
    graph.sort()
    for node in graph:
        for value in node.outputs:
            if value.shape is not None and not value.is_graph_output():  # equal dimensions may differ now
                value.shape = ir.Shape([dim if isinstance(dim, int) else None for dim in value.shape])
    fused = [node for node in graph if node.domain == DOMAIN]
    for key in [key for key in model.functions if key[0] == DOMAIN]:
        del model.functions[key]
    function_bodies.attach(model, fused)


def _next_concat(value: ir.Value) -> tuple[ir.Node, ir.Value] | None:
    """Return the Concat of two images that follows `value`, and its operand on that path; None without one."""
    while len(consumers := value_queries.data_consumers(value)) == 1:
        node = consumers[0]
        if node.op_type == "Concat":
            return (node, value) if len(node.inputs) == 2 else None
        value = node.outputs[0]
    concats = [node for node in consumers if node.op_type == "Concat" and len(node.inputs) == 2]
    return (concats[0], value) if len(concats) == 1 else None


def _crop(graph: ir.Graph, image: ir.Value, skip: ir.Value, first: int) -> None:
    """Crop the axes `first` and `first` + 1 of `image` to the sizes of `skip`, for all consumers."""
    axes = new_initializer(graph, f"{image.name}.crop_axes", [first, first + 1])
    start = new_initializer(graph, f"{image.name}.crop_start", [0, 0])
    shape = ir.node("Shape", [skip])
    sizes = ir.node("Gather", [shape.outputs[0], axes], {"axis": 0})
    crop = ir.node("Slice", [image, start, sizes.outputs[0], axes])
    for new, name in ((shape, "shape"), (sizes, "sizes"), (crop, "cropped")):
        new.outputs[0].name = f"{image.name}.{name}"
        graph.append(new)
    crop.outputs[0].type = image.type
    ir.convenience.replace_all_uses_with(image, crop.outputs[0])
    crop.replace_input_with(0, image)


# (3, 4): taps 0..2 of a filter's row or column from those of the two parities, see `weight_recipes.subpixel_filters`.
THREE_TAPS = [[1, 0, 0, 0], [0, 1, 0, -1], [0, 0, 0, 1]]


def _separate_upsampling(graph: ir.Graph, shuffle: ir.Node) -> ir.Value:
    """Replace NhwcConv 2x2 and SubpixelShuffle by UpsampleNearest and NhwcConv 3x3; return the upsampled image.

    The graph computes the 3x3 filters from the 2x2 ones, so that they follow updates of these.
    """
    phases = value_queries.operand(shuffle, 0)
    conv = value_queries.producer(phases)
    x, weight = conv.inputs[:2]
    assert x is not None
    assert weight is not None
    assert weight.dtype is not None
    count, channels = value_queries.static_size(weight, 0), value_queries.static_size(weight, 3)
    name = shuffle.outputs[0].name
    array = np.array(THREE_TAPS, np.float32)
    taps = new_initializer(graph, f"{name}.taps", array.T.astype(weight.dtype.numpy()))

    def add(op_type: str, inputs: list[ir.Value], **attributes: Any) -> ir.Value:
        node = ir.node(op_type, inputs, attributes)
        node.outputs[0].name = f"{name}.{op_type.lower()}_{len(graph)}"
        node.outputs[0].type = weight.type
        graph.append(node)
        return node.outputs[0]

    def reshape(value: ir.Value, *shape: int) -> ir.Value:
        return add("Reshape", [value, new_initializer(graph, f"{name}.shape_{len(graph)}", list(shape))])

    filters = count // 4
    split = reshape(weight, 2, 2, filters, 2, 2, channels)  # row and column parity, filter, row and column tap
    columns = add("Transpose", [split], perm=[2, 5, 0, 3, 1, 4])
    columns = add("MatMul", [reshape(columns, filters * channels * 4, 4), taps])  # (filter, channel, row, 3)
    rows = add("Transpose", [reshape(columns, filters * channels, 4, 3)], perm=[0, 2, 1])
    rows = add("MatMul", [reshape(rows, filters * channels * 3, 4), taps])  # (filter, channel, column, row)
    square = add("Transpose", [reshape(rows, filters, channels, 3, 3)], perm=[0, 3, 2, 1])
    upsample = ir.node("UpsampleNearest", [x], {"scale_height": 2, "scale_width": 2}, domain=DOMAIN)
    upsample.outputs[0].name, upsample.outputs[0].type = f"{name}.upsampled", x.type
    lists = {"dilations": [1, 1], "kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [1, 1]}
    operands = [upsample.outputs[0], square, *shuffle.inputs[1:]]
    conv3x3 = ir.node("NhwcConv", operands, {"group": 1, **lists}, domain=conv.domain)
    output = shuffle.outputs[0]
    conv3x3.outputs[0].name, conv3x3.outputs[0].type = f"{name}.convolved", output.type
    graph.extend([upsample, conv3x3])
    ir.convenience.replace_all_uses_with(output, conv3x3.outputs[0])
    for node in (shuffle, conv):
        graph.remove(node, safe=True)
    return upsample.outputs[0]
