"""Upsampling in a UNet's graph: by a fixed factor, or to the size of a skip connection."""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.value_queries import is_constant

# Operators between a Shape and the sizes of a Resize that do not change a size.
SIZE_FORWARDING_OPS = ("Cast", "Concat", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Unsqueeze")
UPSAMPLING_OPS = ("Upsample", "UpsampleNearest", "SubpixelShuffle", "Resize")


def requires_even_sizes(model: ir.Model) -> bool:
    """Return whether a graph upsamples by fixed or computed factors instead of to the sizes of other values.

    diffusers' UNets upsample to other values' sizes if a size does not halve evenly at every level (`upsample_size`).
    Exporters trace only one of the two. A graph with factors runs at even sizes only.
    """
    return any(node.op_type in UPSAMPLING_OPS and not _has_sizes_of_values(node) for node in model.graph)


def _has_sizes_of_values(node: ir.Node) -> bool:
    """Return whether a node is a Resize whose sizes are constants and elements of Shapes, at least one of a Shape."""
    sizes = node.inputs[3] if node.op_type == "Resize" and len(node.inputs) > 3 else None
    if sizes is None or is_constant(sizes):
        return False
    operands, has_shape = [sizes], False
    for value in operands:  # the list grows
        producer = value.producer()
        if is_constant(value) or producer is None:
            continue
        if producer.op_type == "Shape":
            has_shape = True
        elif producer.op_type in SIZE_FORWARDING_OPS:
            operands += [operand for operand in producer.inputs if operand is not None]
        else:
            return False
    return has_shape
