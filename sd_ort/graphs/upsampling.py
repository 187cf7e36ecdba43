"""How a UNet's graph enlarges its features: to twice their size, or to the size of the skip connection they meet."""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes import value_queries as c

# What carries the size of another value to a Resize, and leaves it as it is.
CARRYING = ("Cast", "Concat", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Unsqueeze")
ENLARGING = ("Upsample", "UpsampleNearest", "SubpixelShuffle", "Resize")


def doubles(model: ir.Model) -> bool:
    """Whether a graph enlarges by fixed or computed factors, and not to the sizes of values that it has.

    diffusers' UNets do the latter at sizes that do not halve evenly at every level (`upsample_size`), and exporters
    trace what is done at the size they trace: a graph of the other kind can be run at even sizes alone.
    """
    return any(node.op_type in ENLARGING and not _follows(node) for node in model.graph)


def _follows(node: ir.Node) -> bool:
    sizes = node.inputs[3] if node.op_type == "Resize" and len(node.inputs) > 3 else None
    if sizes is None or c.is_constant(sizes):
        return False
    reached, followed = [sizes], False
    for value in reached:  # which grows
        maker = value.producer()
        if c.is_constant(value) or maker is None:
            continue
        if maker.op_type == "Shape":
            followed = True
        elif maker.op_type in CARRYING:
            reached += [operand for operand in maker.inputs if operand is not None]
        else:
            return False
    return followed
