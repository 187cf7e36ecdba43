"""The timestep input of a UNet: shape [] in Optimum's exports, [1] in sd-ort's, [rows] in a hoisted time graph."""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes import value_queries

TIMESTEP = "timestep"


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
