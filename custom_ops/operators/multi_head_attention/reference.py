"""NumPy reference of MultiHeadAttention: softmax(scale * Q K^T + attention_bias) V for each head."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from custom_ops.operator_spec import Array


def heads_view(inputs: Mapping[str, Array], heads: int) -> tuple[Array, Array, Array]:
    """Query (B, S, N, H), key and value (B, L, N, H) out of separate or packed inputs, without copies.

    Packed: query (B, S, N, 3, H) alone, or query (B, S, N * H) with key (B, L, N, 2, H), as com.microsoft takes them.
    """
    query = inputs["query"]
    if query.ndim == 5:
        return query[..., 0, :], query[..., 1, :], query[..., 2, :]
    batch, sequence, hidden = query.shape
    split = query.reshape(batch, sequence, heads, hidden // heads)
    key = inputs["key"]
    if key.ndim == 5:
        return split, key[..., 0, :], key[..., 1, :]
    value = inputs["value"]
    shape = (batch, key.shape[1], heads, hidden // heads)
    return split, key.reshape(shape), value.reshape(shape)


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """Output (B, S, N * H) in float64; a row whose scores are all -infinity is zero."""
    views = heads_view(inputs, int(attributes["num_heads"]))
    query, key, value = (x.transpose(0, 2, 1, 3).astype(np.float64) for x in views)  # products of a BLAS, not einsum's
    batch, heads, sequence, head_size = query.shape
    scale = attributes.get("scale", 0.0) or head_size**-0.5
    scores = query @ key.swapaxes(2, 3) * scale
    if "attention_bias" in inputs:
        scores += inputs["attention_bias"].astype(np.float64)
    if attributes.get("unidirectional", 0):
        scores[..., np.arange(scores.shape[-1]) > np.arange(sequence)[:, None]] = -np.inf
    largest = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isneginf(largest), 0.0, largest))
    total = weights.sum(axis=-1, keepdims=True)
    weights /= np.where(total == 0.0, 1.0, total)
    output = (weights @ value).transpose(0, 2, 1, 3)
    return {"output": output.reshape(batch, sequence, heads * head_size)}
