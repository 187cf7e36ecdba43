"""Checks of an attention's mask, and of the batch and heads of its query, key and value."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir

from fusion_passes import value_queries as values


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
