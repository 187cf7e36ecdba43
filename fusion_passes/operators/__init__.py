"""Definitions of the fused operators. `OPERATORS` is in the row order of the summary of `sd-ort optimize`."""

from __future__ import annotations

from collections.abc import Mapping

from fusion_passes.operators import (
    adaptive_norm,
    bfloat16_attention,
    bfloat16_conv,
    bfloat16_matmul,
    bias_add,
    bias_split_gelu,
    group_norm,
    linear_add,
    linear_split_gelu,
    multi_head_attention,
    nhwc_conv,
    quantized_conv,
    quantized_linear,
    quantized_nhwc_conv,
    quick_gelu,
    rotary_embedding,
    rotary_qkv,
    scaled_dot_product_attention,
    skip_group_norm,
    skip_layer_normalization,
    subpixel_shuffle,
    swiglu,
    upsample_nearest,
    winograd_conv,
)
from fusion_passes.operators.definition import FusedOperator

OPERATORS: tuple[FusedOperator, ...] = (
    multi_head_attention.OPERATOR,
    group_norm.OPERATOR,
    skip_group_norm.OPERATOR,
    bias_split_gelu.OPERATOR,
    linear_split_gelu.OPERATOR,
    bias_add.OPERATOR,
    skip_layer_normalization.OPERATOR,
    quick_gelu.OPERATOR,
    rotary_embedding.OPERATOR,
    rotary_qkv.OPERATOR,
    adaptive_norm.OPERATOR,
    swiglu.OPERATOR,
    upsample_nearest.OPERATOR,
    subpixel_shuffle.OPERATOR,
    nhwc_conv.OPERATOR,
    winograd_conv.OPERATOR,
    bfloat16_attention.OPERATOR,
    bfloat16_conv.OPERATOR,
    bfloat16_matmul.OPERATOR,
    linear_add.OPERATOR,
    quantized_conv.OPERATOR,
    quantized_linear.OPERATOR,
    quantized_nhwc_conv.OPERATOR,
    scaled_dot_product_attention.OPERATOR,
)
BY_NAME: Mapping[str, FusedOperator] = {operator.name: operator for operator in OPERATORS}
