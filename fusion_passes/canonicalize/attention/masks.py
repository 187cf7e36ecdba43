"""Checks of an attention's mask, and of the batch and heads of its query, key and value."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from fusion_passes import value_queries as values
from fusion_passes.graph_edits import unique_name

# Metadata of an attention that was ai.onnx Attention: the results of a row that its mask hides as a whole are 0.
ZERO_ROWS = "fusion_passes.zero_rows"


def is_finite_mask(mask: ir.Value | None, limit: float | None = None) -> bool:
    """Return whether a mask provably has no infinity: it is constant, or a Where of two finite scalars.

    `limit`: the largest finite value of the dtype that the attention reads, by default the mask's dtype.
    """
    node = None if mask is None else mask.producer()
    if limit is None:
        if mask is None or mask.dtype is None or not mask.dtype.is_floating_point():
            return False
        limit = float(ml_dtypes.finfo(mask.dtype.numpy()).max)
    if node is not None and node.op_type == "Where":
        choices = [values.scalar(v) for v in node.inputs[1:]]
        return all(x is not None and abs(x) <= limit for x in choices)
    if node is not None and node.op_type in ("Cast", "Expand", "Reshape", "Slice"):
        return is_finite_mask(node.inputs[0], limit)
    array = values.constant(mask)
    return array is not None and bool((np.abs(array.astype(np.float64)) <= limit).all())


def batch_mismatch(*shapes: list[int | str]) -> str | None:
    """Return how 4-D query, key and value differ in batch or heads, or None if they agree."""
    if any(shape[:2] != shapes[0][:2] for shape in shapes):
        return f"query, key and value differ in batch or heads: {', '.join(str(shape[:2]) for shape in shapes)}"
    return None


def mask_mismatch(
    mask: ir.Value, q: ir.Value, k_sequence: int | str, v: ir.Value, query: list[int | str] | None = None
) -> str | None:
    """Return why a mask does not fit, or None if each of its axes is 1 or that of the scores [B,H,S,L].

    `query`: batch, heads and sequence, if `q` is not [B,H,S,D].
    """
    shape, query = values.dims(mask), query or values.dims(q)
    if shape is None or query is None or not 1 <= len(shape) <= 4:
        return "the mask does not broadcast to [B,H,S,L]"
    scores = [*query[:3], k_sequence]
    if any(axis not in (1, full) for axis, full in zip(shape[::-1], scores[::-1], strict=False)):
        return f"the mask's axes {shape} are not those of the scores {scores}"
    return None if mask.dtype == v.dtype else "the mask and the scores differ in dtype"


def expand_mask(op: Any, mask: ir.Value, q: ir.Value, k: ir.Value, sdpa: ir.Value, axis: int = 1) -> Any:
    """Return `mask`, whose axes are 1 or those of scores, as [1 or B, 1 or N, S, L]; q and k have S and L at `axis`."""

    def ints(numbers: list[int], name: str) -> ir.Value:
        return op.initializer(ir.tensor(numbers, dtype=ir.DataType.INT64), name=unique_name(sdpa, name))

    shape = values.dims(mask) or []
    if shape[-2:] != [(values.dims(q) or [])[axis], (values.dims(k) or [])[axis]]:
        sequences = [op.Shape(x, start=axis, end=axis + 1) for x in (q, k)]
        return op.Expand(mask, op.Concat(ints([1, 1], "mask_ones"), *sequences, axis=0))
    return mask if len(shape) == 4 else op.Unsqueeze(mask, ints(list(range(4 - len(shape))), "mask_axes"))
