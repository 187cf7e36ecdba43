"""Graphs of other architectures: every attention and normalization is fused, and no graph grows."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from fusion_passes.lower import nhwc_layout
from scripts.checks import fused_hashes
from scripts.fixtures import other_architectures
from sd_ort.optimize.targets import CUDA, PORTABLE, Target

NHWC = Target("nhwc", lowering_passes=(nhwc_layout.PASS,))
# The rest of the corpus is in results/fusion_other_architectures.md.
CHECKED = (
    "bert-torchscript-17",
    "dit-torchscript-17",
    "t5-dynamo-20",
    "unet-ddpm-dynamo-20",
    "unet-lora-dynamo-20",
    "unet-resnet-sampling-dynamo-20",
    "unet-text-mask-torchscript-17",
    "vae-sd-torchscript-17",
)
# No attention that can be fused; regions of convolutions between operators without an NHWC form.
ISLANDS = ("vae-deep-torchscript-17", "vae-tiny-dynamo-20", "wuerstchen-dynamo-20")  # fmt: skip


@pytest.mark.parametrize("name", CHECKED)
def test_every_attention_and_norm_is_fused_and_the_graph_does_not_grow(name: str) -> None:
    source = other_architectures.load(name)
    before = other_architectures.operators(ir.from_proto(source))
    start = other_architectures.canonical(source)
    fused = other_architectures.fuse(ir.from_proto(start), PORTABLE)
    attention = fused["MultiHeadAttention"] + fused["ScaledDotProductAttention"]
    norms = fused["GroupNorm"] + fused["SkipGroupNorm"]
    expected = [
        sum(before[op] for op in operators) for operators in (other_architectures.ATTENTION, other_architectures.NORM)
    ]
    assert [attention, norms] == expected
    assert attention > 0
    for after in (fused, other_architectures.fuse(ir.from_proto(start), CUDA)):
        assert other_architectures.why_worse(source, after) is None


@pytest.mark.parametrize("name", ISLANDS)
def test_regions_of_convolutions_add_at_most_two_transposes(name: str) -> None:
    source = other_architectures.load(name)
    assert (
        other_architectures.why_worse(
            source, other_architectures.fuse(ir.from_proto(other_architectures.canonical(source)), CUDA)
        )
        is None
    )


@pytest.mark.parametrize("name", ["unet-resnet-sampling-dynamo-20", "unet-text-mask-torchscript-17"])
def test_outputs_are_equal_at_two_shapes(name: str) -> None:
    source = other_architectures.load(name)
    assert max(other_architectures.errors(source, other_architectures.canonical(source), NHWC)) < 1e-5


def test_unmerged_lora_does_not_prevent_the_geglu_fusion() -> None:
    fused = other_architectures.fuse(
        ir.from_proto(other_architectures.canonical(other_architectures.load("unet-lora-dynamo-20"))), PORTABLE
    )
    assert fused["BiasSplitGelu"] == 4


@pytest.mark.parametrize(("name", "rotations", "norms"), [("flux-dynamo-20", 2, 6), ("sd3-dynamo-20", 2, 8)])
def test_hashes_of_transformers(name: str, rotations: int, norms: int) -> None:
    """scripts/checks/fused_hashes.py has a transformer with each of its fusions, and tells one that is missing."""
    report = fused_hashes.fused(f"other_architectures/{name}", "gpu", "float16")
    expected = {"MultiHeadAttention": 2, "RotaryQkv": rotations, "AdaptiveNorm": norms, "LinearAdd": 15}
    assert {op: report["nodes"][f"sd_ort.{op}"] for op in expected} == expected
    fewer = {**report, "all": "", "nodes": {**report["nodes"], "sd_ort.RotaryQkv": 1}}
    assert fused_hashes.difference(report, fewer) == "sd_ort.RotaryQkv -1"
