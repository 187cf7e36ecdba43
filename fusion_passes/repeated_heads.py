"""Grouped-query attention: keys and values whose heads are repeated, one for each query head of a group."""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes import value_queries as values


def unrepeated(value: ir.Value | None, axis: int) -> ir.Value | None:
    """Return x for the value Reshape(Expand(x [.., M, 1, ..] to [.., M, g, ..])), which repeats M heads g times each.

    None if `value` does not repeat heads, or its sizes are unknown.

    Args:
        axis: of the heads, 1 in [B,N,S,D] and 2 in [B,S,N,D]. For 2, the value and x may be [B,S,N*D] and [B,S,M*D].
    """
    reshape = None if value is None else value.producer()
    expand = _producer(reshape, "Reshape")
    view = _producer(expand, "Expand")
    if reshape is None or expand is None or view is None or view.op_type not in ("Reshape", "Unsqueeze"):
        return None
    before, after = values.dims(expand.inputs[0]) or [], values.dims(reshape.inputs[0]) or []
    if len(before) != 5 or len(after) != 5 or before[axis + 1] != 1:
        return None
    heads, groups, size = after[axis], after[axis + 1], after[4]
    if not isinstance(heads, int) or not isinstance(groups, int) or not isinstance(size, int):
        return None
    one = before[: axis + 1] + before[axis + 2 :]
    if one != after[: axis + 1] + after[axis + 2 :]:
        return None
    many = [*one[:axis], heads * groups, *one[axis + 1 :]]
    shapes = [(one, many)]
    if axis == 2:
        flat = ([*one[:2], heads * size], [*one[:2], heads * groups * size])
        shapes = [(a, b) for a in (one, flat[0]) for b in (many, flat[1])]
    return view.inputs[0] if (values.dims(view.inputs[0]), values.dims(value)) in shapes else None


def _producer(node: ir.Node | None, op_type: str) -> ir.Node | None:
    """Return the node that computes the first input of `node`, which is an `op_type`, or None."""
    if node is None or node.op_type != op_type or node.domain or node.inputs[0] is None:
        return None
    return node.inputs[0].producer()
