"""What may be said of an attention's mask, and of what its query, key and value have in common."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir

from fusion_passes import checks as c


def is_finite_mask(mask: ir.Value | None, limit: float | None = None) -> bool:
    """Whether a mask surely holds no infinity: a constant, or a choice between two finite numbers.

    `limit`: the largest finite number of the type it is read in, that of the mask itself when not given.
    """
    node = None if mask is None else mask.producer()
    if limit is None:
        if mask is None or mask.dtype is None or not mask.dtype.is_floating_point():
            return False
        limit = float(ml_dtypes.finfo(mask.dtype.numpy()).max)
    if node is not None and node.op_type == "Where":
        choices = [c.scalar(v) for v in node.inputs[1:]]
        return all(x is not None and abs(x) <= limit for x in choices)
    if node is not None and node.op_type in ("Cast", "Expand", "Reshape", "Slice"):
        return is_finite_mask(node.inputs[0], limit)
    numbers = c.constant(mask)
    return numbers is not None and bool((np.abs(numbers.astype(np.float64)) <= limit).all())


def why_not_batch(*shapes: list[int | str]) -> str | None:
    """Why 4-D query, key and value cannot belong to one attention, or None: batch and heads are the same."""
    if any(shape[:2] != shapes[0][:2] for shape in shapes):
        return f"query, key and value differ in batch or heads: {', '.join(str(shape[:2]) for shape in shapes)}"
    return None


def why_not_mask(
    mask: ir.Value, q: ir.Value, k_sequence: int | str, v: ir.Value, query: list[int | str] | None = None
) -> str | None:
    """Why a mask cannot be carried over, or None: each of its axes is 1 or that of the scores [B,H,S,L].

    `query`: batch, heads and sequence, where `q` is not [B,H,S,D] itself.
    """
    shape, query = c.dims(mask), query or c.dims(q)
    if shape is None or query is None or not 1 <= len(shape) <= 4:
        return "the mask does not broadcast to [B,H,S,L]"
    scores = [*query[:3], k_sequence]
    if any(axis not in (1, full) for axis, full in zip(shape[::-1], scores[::-1], strict=False)):
        return f"the mask's axes {shape} are not those of the scores {scores}"
    return None if mask.dtype == v.dtype else "the mask is of another type than the scores"
