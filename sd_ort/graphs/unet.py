"""Two properties of a UNet graph: the shape of its timestep, and the image sizes that its upsampling supports.

The timestep has shape [] in Optimum's exports, [1] in sd-ort's, and [rows] in a hoisted time graph.
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes import value_queries

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
