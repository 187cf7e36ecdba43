"""Limits of onnxruntime-rocm's kernels, as the target's table has them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from sd_ort.optimize.targets import ROCM


@pytest.mark.parametrize("op_type", ["GroupNorm", "SkipGroupNorm"])
@pytest.mark.parametrize(("channels", "reason"), [(64, None), (48, None), (96, "an even number")])
def test_channels_of_group_norms(op_type: str, channels: int, reason: str | None) -> None:
    gamma = ir.Value(name="gamma", shape=ir.Shape([channels]), const_value=ir.Tensor(np.ones(channels, np.float32)))
    groups = 32 if channels == 96 else 8
    node = ir.node(op_type, [ir.Value(name="x"), gamma], {"groups": groups, "channels_last": 1}, domain="sd_ort")
    violation = ROCM.contrib_constraints[op_type](node)
    assert violation is None if reason is None else reason in str(violation)


def test_attention_is_ours() -> None:
    assert "MultiHeadAttention" not in ROCM.contrib_constraints
    assert ROCM.newest_opset == 20


def test_layer_normalization_is_ours() -> None:
    """The wheel's is wrong on RDNA; SkipLayerNormalization with a row as skip has no kernel in it."""
    assert "layer_norm" in [each.name for each in ROCM.lowering_passes]
    row = ir.node("SkipLayerNormalization", [ir.Value(shape=ir.Shape(["B", "S", 8])), ir.Value(shape=ir.Shape([8]))])
    assert "no row as skip" in str(ROCM.contrib_constraints["SkipLayerNormalization"](row))
