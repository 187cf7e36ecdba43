"""Test cases of Bfloat16Attention, with the Params and the reference of MultiHeadAttention; it has no GPU kernel.

The reference is the float64 attention of the rounded inputs; the kernel also rounds its weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ml_dtypes

from custom_ops.operator_spec import Array, OperatorCase
from custom_ops.operators.multi_head_attention import cases as exact
from custom_ops.operators.multi_head_attention.cases import (
    Params,
    attention_case,
    generate_special_input,
    output_shapes,
    params,
)

__all__ = [
    "CASES", "INPUTS", "NAME", "OUTPUTS", "Params", "generate_special_input", "output_shapes", "params",
]  # fmt: skip

NAME = "Bfloat16Attention"
INPUTS = ("query", "key", "value")
OUTPUTS = ("output",)

# A weight is rounded by up to 2^-9 of itself: a weighted mean of values moves by less than that of the values.
_WEIGHTS = 2.0**15


def _case(
    *sizes: int, packed: str = "", distribution: str = "normal", scale: float = 0.0, **options: Any
) -> OperatorCase:
    """Return a case of these batch, heads, sequence, kv_sequence and head size.

    scale: 0 is the default of the operator. options: arguments of `attention_case`.
    """
    case = attention_case(*sizes, packed=packed, distribution=distribution, roundoffs=_WEIGHTS, **options)
    if scale:
        case = replace(case, name=f"{case.name}-scale{scale}", attributes={**case.attributes, "scale": scale})
    return replace(case, dtypes=("float32", "bfloat16"))


# Sizes that no block, step or vector divides; more queries than a task has, more keys than a step; one key, one query.
CASES = [
    _case(1, 1, 1, 1, 1),
    _case(2, 2, 40, 40, 40, packed="qkv"),
    _case(2, 2, 33, 77, 40, packed="kv"),
    _case(1, 2, 64, 64, 80, packed="qkv"),
    _case(1, 2, 300, 290, 24),
    _case(1, 1, 131, 129, 32),
    _case(1, 1, 17, 31, 162),
    _case(2, 1, 5, 3, 64, packed="kv"),
    _case(1, 1, 40, 50, 64, scale=-0.25),
    _case(1, 1, 64, 200, 64, distribution="peaked"),
    _case(1, 1, 20, 150, 48, scale=1e-6),
    _case(1, 1, 70, 131, 512),
    _case(2, 6, 40, 77, 40, kv_num_heads=2),
    _case(1, 4, 33, 40, 64, kv_num_heads=1, packed="kv"),
]


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """Output (B, S, N * H) in float64."""
    return exact.reference({name: array.astype(ml_dtypes.bfloat16) for name, array in inputs.items()}, attributes)
