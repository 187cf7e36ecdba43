"""NumPy reference of Bfloat16Attention: float64 attention of the rounded inputs; the kernel also rounds its weights."""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes

from custom_ops.operator_spec import Array
from custom_ops.operators.multi_head_attention import reference as exact


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """Output (B, S, N * H) in float64."""
    return exact.reference({name: array.astype(ml_dtypes.bfloat16) for name, array in inputs.items()}, attributes)
