"""Stages of the ablation: a target with more and more of its fusions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fusion_passes.lower.inline_fused_ops import inline_fused_ops

if TYPE_CHECKING:
    from sd_ort.optimize.targets import Target


@dataclass(frozen=True)
class Stage:
    """One row of the ablation: its label, and the names of the target's passes that it adds.

    `rest`: adds every other fusion of the target.
    """

    label: str
    passes: tuple[str, ...] = ()
    rest: bool = False


# In the order of ONNX Runtime's report on Stable Diffusion. The op library has no stage: only the complete target uses
# it.
ABLATION = {
    "none": Stage("nothing fused", ("inline_fused_ops", "standard_attention")),
    "mha": Stage("+ MultiHeadAttention", ("multi_head_attention",)),
    "nhwc": Stage("+ NHWC convolution", ("nhwc_layout",)),
    "norm": Stage("+ GroupNorm", ("group_norm",)),
    "gelu": Stage("+ BiasSplitGelu", ("bias_split_gelu",)),
    "qkv": Stage("+ packed QKV", ("pack_qkv",)),
    "skip": Stage("+ BiasAdd, SkipLayerNorm", ("bias_add", "skip_layer_normalization")),
    "all": Stage("+ SkipGroupNorm, QuickGelu", ("skip_group_norm", "quick_gelu"), rest=True),
}


def ablation_steps(target: Target) -> dict[str, Target]:
    """Return the target up to each stage: a slice of its passes. Stages that change nothing are absent.

    All stages use the provider's own kernels only. Until "norm", GroupNorm nodes are inlined again, because most
    providers have kernels for the parts but not for GroupNormalization; so is attention that no fusion took.
    """
    from sd_ort.optimize.targets import CUDA_CONTRIB

    constraints = CUDA_CONTRIB if target.name == "cuda" else target.contrib_constraints
    stages: dict[str, Target] = {}
    names: set[str] = set()
    for name, stage in ABLATION.items():
        names |= set(stage.passes)
        passes = tuple(lowering for lowering in target.lowering_passes if lowering.name in names)
        if not stage.rest:
            inlined = ("ScaledDotProductAttention", *(() if "group_norm" in names else ("GroupNorm",)))
            passes = (inline_fused_ops(*inlined), *passes)
        fusions = tuple(fusion for fusion in target.fusions if stage.rest or fusion.name in names)
        partial = replace(target, lowering_passes=passes, fusions=fusions, contrib_constraints=constraints)
        if partial not in stages.values():
            stages[name] = partial
    return stages
