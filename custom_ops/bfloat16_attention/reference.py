"""Bfloat16Attention in NumPy: the attention of the rounded numbers, in float64. The kernel rounds its weights too."""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes

from custom_ops.multi_head_attention import reference as exact
from custom_ops.op import Array


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """Output (B, S, N * H) in float64."""
    return exact.reference({name: array.astype(ml_dtypes.bfloat16) for name, array in inputs.items()}, attributes)
