"""The timestep of a UNet: one number of shape [] in Optimum's graphs, of [1] in ours, which may become rows of them."""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes import value_queries as c

TIMESTEP = "timestep"


def give_axis(model: ir.Model) -> bool:
    """Let the timestep of a UNet be [1] where it is [], which computes the same; returns whether it has an axis now.

    As every exporter writes diffusers' UNets, all that reads the scalar, perhaps cast, is an Unsqueeze, Reshape or
    Expand to one axis, and the first two of these have nothing left to do. Otherwise the graph stays as it is.
    """
    timestep = next((value for value in model.graph.inputs if value.name == TIMESTEP), None)
    if timestep is None or timestep.shape is None:
        return False
    if len(timestep.shape):
        return True
    scalars, makers = [timestep], []
    for value in scalars:  # which grows
        for node in c.consumers(value):
            if node.op_type in ("Cast", "Identity"):
                scalars.append(node.outputs[0])
            elif node.op_type in ("Unsqueeze", "Reshape", "Expand") and _gives_one_axis(node):
                makers.append(node)
            else:
                return False
    if any(value.is_graph_output() for value in scalars):
        return False
    for value in scalars:
        value.shape = ir.Shape([1])
    for node in makers:
        if node.op_type != "Expand" and node.inputs[0] is not None:
            ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[0])
            model.graph.remove(node, safe=True)
    return True


def _gives_one_axis(node: ir.Node) -> bool:
    """Whether the axes, or the shape, that a node gives a scalar are one; opset 12 has axes as an attribute."""
    if len(node.inputs) == 1:
        return len(node.attributes.get_ints("axes") or ()) == 1
    axes = c.ints(node.inputs[1])
    return c.size(node.inputs[1], 0) == 1 if axes is None else len(axes) == 1
