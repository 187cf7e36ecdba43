"""Grouped-query attention: keys and values whose heads are repeated, one for each query head of a group."""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir

from fusion_passes import value_queries as values
from fusion_passes.graph_edits import new_initializer, unique_name


class _Repetition(NamedTuple):
    """Heads `single` that are repeated: `heads` of them, `times` each."""

    single: ir.Value
    heads: int
    times: int


def heads_before_repetition(value: ir.Value | None, axis: int) -> ir.Value | None:
    """Return x for the value Reshape(Expand(x [.., M, 1, ..] to [.., M, g, ..])), which repeats M heads g times each.

    Expand may be a Tile. None if `value` does not repeat heads, or its sizes are unknown.

    Args:
        axis: of the heads, 1 in [B,N,S,D] and 2 in [B,S,N,D]. For 2, the value and x may be [B,S,N*D] and [B,S,M*D].
    """
    repetition = _repetition(value, axis)
    return None if repetition is None else repetition.single


def _repetition(value: ir.Value | None, axis: int) -> _Repetition | None:
    """Return how `value` repeats heads, or None; see `heads_before_repetition`."""
    reshape = None if value is None else value.producer()
    repeat = _producer(reshape, "Reshape")
    view = _producer(repeat, "Expand") or _producer(repeat, "Tile")
    if reshape is None or repeat is None or view is None or view.op_type not in ("Reshape", "Unsqueeze"):
        return None
    before, after = values.dims(repeat.inputs[0]) or [], values.dims(reshape.inputs[0]) or []
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
    single = view.inputs[0]
    if single is None or (values.dims(single), values.dims(value)) not in shapes:
        return None
    return _Repetition(single, heads, groups)


def kv_head_count(node: ir.Node, axis: int) -> int | None:
    """Return how many heads the key and value of an attention have before these are repeated for the query heads.

    None if they are not both repeated from the same number of heads; `axis` as in `heads_before_repetition`.
    """
    key, value = (_repetition(each, axis) for each in node.inputs[1:3])
    if key is None or value is None or key[1:] != value[1:]:
        return None
    # a flat key may be split into other heads than those that are repeated
    return key.heads if axis == 1 or key.heads * key.times == node.attributes["num_heads"].as_int() else None


def kv_before_repetition(graph: ir.Graph, node: ir.Node, axis: int) -> list[ir.Value | None]:
    """Return key and value of an attention before their heads are repeated, or its inputs if `kv_head_count` is None.

    Heads at axis 2 are flattened: [B,L,M*D].
    """
    if kv_head_count(node, axis) is None:
        return list(node.inputs[1:3])
    single = [heads_before_repetition(value, axis) for value in node.inputs[1:3]]
    return single if axis == 1 else [_flat(graph, node, value) for value in single if value is not None]


def _flat(graph: ir.Graph, node: ir.Node, value: ir.Value) -> ir.Value:
    """Return [B,L,M,D] as [B,L,M*D]."""
    shape = values.dims(value) or []
    if len(shape) == 3:
        return value
    heads, size = shape[2:]
    assert isinstance(heads, int)
    assert isinstance(size, int)
    view = value.producer()
    if view is not None and view.op_type == "Reshape" and values.dims(view.inputs[0]) == [*shape[:2], heads * size]:
        assert view.inputs[0] is not None
        return view.inputs[0]
    name = unique_name(node.outputs[0], "flat")
    flat = ir.node("Reshape", [value, new_initializer(graph, name, [0, 0, -1])])
    flat.outputs[0].name, flat.outputs[0].type = f"{name}.tokens", value.type
    flat.outputs[0].shape = ir.Shape([*shape[:2], heads * size])
    graph.insert_before(node, flat)
    return flat.outputs[0]


def _producer(node: ir.Node | None, op_type: str) -> ir.Node | None:
    """Return the node that computes the first input of `node`, which is an `op_type`, or None."""
    if node is None or node.op_type != op_type or node.domain or node.inputs[0] is None:
        return None
    return node.inputs[0].producer()
