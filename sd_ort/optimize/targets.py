"""What each execution provider runs: one table a target, read by `optimize` when it lowers fused nodes.

A fused node goes to the first of these that holds: ONNX Runtime's own kernel (`contrib`, domain com.microsoft) when
its limits allow this node, our operator (domain `sd_ort`, a kernel of the library or else the function body that the
model carries), or its parts (`expand`). Limits are those measured on onnxruntime 1.31.1 (CPU, CUDA) and read from the
sources of onnxruntime-rocm 1.22.2.post3 and MIGraphX EP 1.27.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from fusion_passes import checks as c

Limit = Callable[[ir.Node], str | None]


def _any(node: ir.Node) -> str | None:
    return None


def _even_channels_a_group(node: ir.Node) -> str | None:
    channels, groups = c.size(node.inputs[1], 0), node.attributes["groups"].as_int()
    if channels is None or channels % groups or (channels // groups) % 2:
        return f"its kernel needs an even number of channels a group, not {channels}/{groups}"
    return None


def _cuda_gelu_width(node: ir.Node) -> str | None:
    width = c.size(node.inputs[1], 0)
    return None if width in (2560, 5120, 6144, 10240, 12288) else f"its kernel has no width {width}"


def _short_keys(node: ir.Node) -> bool:
    """Attentions whose keys are few, as far as a graph with dynamic sizes tells: other keys than queries (text), or
    heads of 160 and more, which Stable Diffusion has at its coarsest levels. There onnxruntime 1.31's CPU kernel of
    ai.onnx Attention beats that of MultiHeadAttention, whose blocks pay for long sequences (results/cpu_unet_sd15.md).
    """
    query, key, size = c.dims(node.inputs[0]), c.dims(node.inputs[1]), _head_size(node)
    if query is None or key is None or size is None:
        return False
    return query[1] != key[1] or size >= 160


def _head_size(node: ir.Node) -> int | None:
    """Elements of a head's row of an attention's query, packed (its last axis) or not."""
    query = c.dims(node.inputs[0])
    if query is None or not isinstance(query[-1], int):
        return None
    return query[-1] if len(query) == 5 else query[-1] // node.attributes["num_heads"].as_int()


def _narrow_heads(node: ir.Node) -> str | None:
    size = _head_size(node)
    slow = size is not None and size > 256
    return f"its kernel for heads of {size} runs at a fifth of the speed of two products" if slow else None


def _three_axes(node: ir.Node) -> str | None:
    return None if c.rank(node.inputs[0]) == 3 else "its kernel takes [N,S,C] only"


def _whole_skip(node: ir.Node) -> str | None:
    return None if c.rank(node.inputs[1]) == 3 else "its kernel takes no row as skip"


def _no_bias_input(node: ir.Node) -> str | None:
    bias = len(node.inputs) > 3 and node.inputs[3] is not None
    return "its kernel refuses a bias input" if bias else None


@dataclass(frozen=True)
class Target:
    """One execution provider: its layout, and for each fused operator the limit of the provider's own kernel.

    Operators absent from `contrib` run as `sd_ort` operators, unless `expand` names them: those are taken apart again.
    `fold_bias` moves biases into what reads the sums (`layout` NHWC only); `linear_add` makes matrix products, and
    convolutions of one pixel, LinearAdd; `layer_norm` gives LayerNormalization our kernel; `upsample` makes Resize
    UpsampleNearest. `leave` names fusions (modules of fusion_passes) that are not applied at all. `standard_attention`
    picks the attentions that become ai.onnx Attention; `winograd` makes 3 x 3 convolutions WinogradConv, whose only
    kernel is for CPUs. `float32_inputs` are inputs (operator, index) that stay in fp32 in a half precision model.
    """

    name: str
    layout: str = "NCHW"
    pack: bool = False
    fold_bias: bool = False
    linear_add: bool = False
    layer_norm: bool = False
    upsample: bool = False
    contrib: Mapping[str, Limit] = field(default_factory=dict)
    expand: frozenset[str] = frozenset()
    leave: frozenset[str] = frozenset()
    standard_attention: Callable[[ir.Node], bool] | None = None
    winograd: bool = False
    float32_inputs: frozenset[tuple[str, int]] = frozenset()


_FP32_AFFINE = frozenset({("GroupNorm", 1), ("GroupNorm", 2), ("SkipGroupNorm", 1), ("SkipGroupNorm", 2)})

PORTABLE = Target("portable")

# onnxruntime 1.31's own SkipLayerNormalization and its InstanceNormalization path are slower than `sd_ort`'s kernels,
# and than the parts when there is no library (results/cpu_unet_sd15.md); attention is the other way round.
CPU = Target(
    "cpu",
    contrib={"QuickGelu": _any, "MultiHeadAttention": _any},
    expand=frozenset({"ScaledDotProductAttention"}),
    standard_attention=_short_keys,
    winograd=True,
)

# Every kernel that the CUDA provider has for fused operators.
CUDA_CONTRIB: Mapping[str, Limit] = {
    "GroupNorm": _even_channels_a_group,
    "SkipGroupNorm": _even_channels_a_group,
    "BiasSplitGelu": _cuda_gelu_width,
    "BiasAdd": _three_axes,
    "SkipLayerNormalization": _whole_skip,
    "MultiHeadAttention": _any,
    "NhwcConv": _any,
    "QuickGelu": _any,
}

# Of these, what beats ours on an H200 (results/gpu_step.md).
CUDA = Target(
    "cuda",
    layout="NHWC",
    pack=True,
    fold_bias=True,
    linear_add=True,
    layer_norm=True,
    upsample=True,
    contrib={
        **{name: CUDA_CONTRIB[name] for name in ("NhwcConv", "QuickGelu", "SkipLayerNormalization")},
        "MultiHeadAttention": _narrow_heads,
    },
    expand=frozenset({"ScaledDotProductAttention"}),
    float32_inputs=_FP32_AFFINE,
)

ROCM = Target(
    "rocm",
    layout="NHWC",
    pack=True,
    fold_bias=True,
    upsample=True,
    contrib={**CUDA_CONTRIB, "MultiHeadAttention": _no_bias_input},
    expand=frozenset({"ScaledDotProductAttention"}),
    float32_inputs=_FP32_AFFINE,
)

MIGRAPHX = Target(
    "migraphx",
    layout="NHWC",
    contrib={
        "GroupNorm": _any,
        "SkipLayerNormalization": _any,
        "MultiHeadAttention": _any,
        "NhwcConv": _any,
        "QuickGelu": _any,
    },
    expand=frozenset({"ScaledDotProductAttention"}),
    leave=frozenset({"skip_group_norm", "bias_add", "bias_split_gelu"}),
)

# Our own provider (custom_ops/provider): operators of domains `sd_ort` and ai.onnx only, since contrib schemas are not
# shared with plugins; each fused one has its kernel there.
HIP = Target(
    "hip",
    layout="NHWC",
    pack=True,
    fold_bias=True,
    linear_add=True,
    layer_norm=True,
    upsample=True,
    expand=frozenset({"ScaledDotProductAttention"}),
    float32_inputs=_FP32_AFFINE,
)
GPU = replace(HIP, name="gpu")

TARGETS: Mapping[str, Target] = {t.name: t for t in (PORTABLE, CPU, CUDA, ROCM, MIGRAPHX, HIP, GPU)}
