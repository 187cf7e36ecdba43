"""The ablation's steps: a target as far as one fusion after the other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sd_ort.optimize.targets import Target


@dataclass(frozen=True)
class Step:
    """One row of the ablation: its label, and what is switched on from here on.

    `fusions`: modules of fusion_passes. `layout`, `pack`, `norm`: NHWC, packed projections, GroupNorm as one node.
    """

    label: str
    fusions: tuple[str, ...] = ()
    layout: bool = False
    pack: bool = False
    norm: bool = False
    rest: bool = False


# The order of ONNX Runtime's report on Stable Diffusion.
ABLATION = {
    "none": Step("nothing fused"),
    "mha": Step("+ MultiHeadAttention", ("multi_head_attention",)),
    "nhwc": Step("+ NHWC convolution", layout=True),
    "norm": Step("+ GroupNorm", norm=True),
    "gelu": Step("+ BiasSplitGelu", ("bias_split_gelu",)),
    "qkv": Step("+ packed QKV", pack=True),
    "skip": Step("+ BiasAdd, SkipLayerNorm", ("bias_add", "skip_layer_normalization")),
    "all": Step("+ SkipGroupNorm, QuickGelu", ("skip_group_norm", "quick_gelu"), rest=True),
}


def ablation_steps(target: Target) -> dict[str, Target]:
    """Step -> the target as far as that step: what comes later is left out. Steps that change nothing are absent.

    All steps use the provider's own kernels: what the op library brings is left out, and the whole target has it.
    Before the step "norm" a GroupNorm node is made and taken apart again, since a lone GroupNormalization has no
    kernel on most providers, while its parts have.
    """
    from sd_ort.optimize.targets import CUDA_CONTRIB

    bare = replace(
        target,
        contrib=CUDA_CONTRIB if target.name == "cuda" else target.contrib,
        fold_bias=False,
        linear_add=False,
        layer_norm=False,
        upsample=False,
        winograd=False,
    )
    steps: dict[str, Target] = {}
    off = {fusion for step in ABLATION.values() for fusion in step.fusions}
    layout, pack, norm = "NCHW", False, False
    for name, step in ABLATION.items():
        off -= set(step.fusions)
        layout = target.layout if step.layout else layout
        pack, norm = pack or step.pack, norm or step.norm
        expand = target.expand | {"ScaledDotProductAttention"} | (frozenset() if norm else {"GroupNorm"})
        made = replace(
            bare,
            layout=layout,
            pack=pack and target.pack,
            expand=target.expand if step.rest else frozenset(expand),
            leave=target.leave | off,
        )
        if made not in steps.values():
            steps[name] = made
    return steps
