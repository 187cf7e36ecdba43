"""The ablation's steps: a target as far as one fusion after the other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fusion_passes.lower.inline_fused_ops import inline_fused_ops

if TYPE_CHECKING:
    from sd_ort.optimize.targets import Target


@dataclass(frozen=True)
class Step:
    """One row of the ablation: its label, and the passes of the target, by name, that run from here on.

    `rest`: every fusion of the target, whatever its name.
    """

    label: str
    passes: tuple[str, ...] = ()
    rest: bool = False


# The order of ONNX Runtime's report on Stable Diffusion. What the op library brings has no step: the whole target has.
ABLATION = {
    "none": Step("nothing fused", ("inline_fused_ops", "standard_attention")),
    "mha": Step("+ MultiHeadAttention", ("multi_head_attention",)),
    "nhwc": Step("+ NHWC convolution", ("nhwc_layout",)),
    "norm": Step("+ GroupNorm", ("group_norm",)),
    "gelu": Step("+ BiasSplitGelu", ("bias_split_gelu",)),
    "qkv": Step("+ packed QKV", ("pack_qkv",)),
    "skip": Step("+ BiasAdd, SkipLayerNorm", ("bias_add", "skip_layer_normalization")),
    "all": Step("+ SkipGroupNorm, QuickGelu", ("skip_group_norm", "quick_gelu"), rest=True),
}


def ablation_steps(target: Target) -> dict[str, Target]:
    """Step -> the target as far as that step: a slice of its passes. Steps that change nothing are absent.

    All steps use the provider's own kernels: what the op library brings is left out, and the whole target has it.
    Before the step "norm" a GroupNorm node is made and taken apart again, since a lone GroupNormalization has no
    kernel on most providers, while its parts have; so is an attention that no fusion took.
    """
    from sd_ort.optimize.targets import CUDA_CONTRIB

    constraints = CUDA_CONTRIB if target.name == "cuda" else target.contrib_constraints
    steps: dict[str, Target] = {}
    on: set[str] = set()
    for name, step in ABLATION.items():
        on |= set(step.passes)
        passes = tuple(each for each in target.lowering_passes if each.name in on)
        if "group_norm" not in on:
            passes = (inline_fused_ops("ScaledDotProductAttention", "GroupNorm"), *passes)
        elif not step.rest:
            passes = (inline_fused_ops("ScaledDotProductAttention"), *passes)
        fusions = tuple(each for each in target.fusions if step.rest or each.name in on)
        made = replace(target, lowering_passes=passes, fusions=fusions, contrib_constraints=constraints)
        if made not in steps.values():
            steps[name] = made
    return steps
