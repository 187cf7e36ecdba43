"""Targets: the passes for each execution provider, and its own kernels for fused nodes.

After the passes, a fused node becomes ONNX Runtime's own operator (com.microsoft) if the constraint of its kernel
allows, else an operator of domain `sd_ort`: a kernel of the op library, or the function body in the model. Constraints
were measured on onnxruntime 1.31.1 (CPU, CUDA) and, on a simulated GPU, onnxruntime-rocm 1.22.2.post3, and read from
the sources of MIGraphX EP 1.27.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from fusion_passes import value_queries as c
from fusion_passes.fuse import FUSIONS, TRANSFORMER_FUSIONS
from fusion_passes.graph_pass import Pass
from fusion_passes.lower import (
    adaptive_norm,
    bfloat16_activations,
    bfloat16_attention,
    bfloat16_layout,
    bfloat16_matmul_conv,
    channel_norm,
    contrib_kernels,
    conv_factor,
    conv_relu,
    fold_bias,
    fused_conv,
    grouped_heads,
    layer_norm,
    linear_add,
    linear_split_gelu,
    nhwc_layout,
    pack_qkv,
    rotary_qkv,
    split_concat,
    split_product,
    subpixel_conv,
    swiglu,
    transposed_attention,
    upsample_nearest,
    winograd_conv,
)
from fusion_passes.lower.inline_fused_ops import inline_fused_ops
from fusion_passes.lower.standard_attention import (
    KernelConstraint,
    grouped_attention,
    grouped_sdpa,
    standard_attention,
    standard_sdpa,
)
from fusion_passes.operators import OPERATORS
from fusion_passes.repeated_heads import heads_before_repetition
from sd_ort.runtime.ort_wheel import installed_wheels
from sd_ort.runtime.provider_choice import choose_provider, installed_gpus, target_of
from sd_ort.runtime.provider_table import WHEELS
from sd_ort.runtime.rocm_kernels import NEWEST_OPSET


def _any(node: ir.Node) -> str | None:
    return None


def _channels_last(node: ir.Node) -> str | None:
    last = node.attributes.get_int("channels_last", 0)
    return None if last else "its kernel reads channels-last images, and the region around it stays NCHW"


def _even_channels_per_group(node: ir.Node) -> str | None:
    if reason := _channels_last(node):
        return reason
    channels, groups = c.size(node.inputs[1], 0), node.attributes["groups"].as_int()
    if channels is None or channels % groups or (channels // groups) % 2:
        return f"its kernel needs an even number of channels per group, not {channels}/{groups}"
    return None


def _without_epilogue(node: ir.Node) -> str | None:
    has_epilogue = node.attributes.get_int("relu", 0) or len(node.inputs) > 3
    return "its kernel adds no image and has no activation" if has_epilogue else None


def _cuda_gelu_width(node: ir.Node) -> str | None:
    width = c.size(node.inputs[1], 0)
    return None if width in (2560, 5120, 6144, 10240, 12288) else f"its kernel has no width {width}"


def _long_keys(node: ir.Node) -> str | None:
    """Return why an attention keeps MultiHeadAttention on the CPU, or None if ai.onnx Attention is faster.

    onnxruntime 1.31's kernel of MultiHeadAttention is faster for long sequences, that of Attention for few keys
    (results/cpu_unet_sd15.md). In graphs with dynamic sizes, few keys means cross-attention, or heads of 160 and more,
    which Stable Diffusion has at its lowest resolutions. Attention is also faster than keys that are repeated.
    """
    query, key, size = c.dims(node.inputs[0]), c.dims(node.inputs[1]), _head_size(node)
    if heads_before_repetition(node.inputs[1], 2) is not None:
        return None
    if query is None or key is None or size is None:
        return "its sizes are unknown"
    few = query[1] != key[1] or size >= 160
    return None if few else "with as many keys as queries the kernel of MultiHeadAttention is faster"


def _uncapped(node: ir.Node) -> str | None:
    capped = node.attributes.get_float("softcap", 0.0)
    return "its kernel takes 1.6 times as long as products, Tanh and Softmax" if capped else None


def _head_size(node: ir.Node) -> int | None:
    """Return the head size of an attention, from its query in packed or unpacked layout."""
    query = c.dims(node.inputs[0])
    if query is None or not isinstance(query[-1], int):
        return None
    return query[-1] if len(query) > 3 else query[-1] // node.attributes["num_heads"].as_int()


def _square_if_causal(node: ir.Node) -> str | None:
    """Return why ONNX Runtime's MultiHeadAttention cannot run an attention: its causal mask ends at the last key."""
    if not node.attributes.get_int("unidirectional", 0) or len(node.inputs) < 3 or node.inputs[2] is None:
        return None
    query, key = (c.dims(value) for value in node.inputs[:2])
    same = query is not None and key is not None and query[1] == key[1]
    return None if same else "it is causal with another number of keys than of queries"


def _narrow_heads(node: ir.Node) -> str | None:
    if node.op_type == "MultiHeadAttention" and (reason := _square_if_causal(node)):
        return reason
    source = node.inputs[0].producer() if node.inputs[0] is not None else None
    if source is not None and source.op_type == "RotaryQkv":
        return "its kernel copies packed heads first"
    size = _head_size(node)
    slow = size is not None and size > 256
    return f"its kernel for heads of {size} runs at a fifth of the speed of two products" if slow else None


def _three_axes(node: ir.Node) -> str | None:
    return None if c.rank(node.inputs[0]) == 3 else "its kernel takes [N,S,C] only"


def _full_skip(node: ir.Node) -> str | None:
    return None if c.rank(node.inputs[1]) == 3 else "its kernel takes no row as skip"


@dataclass(frozen=True)
class Target:
    """An execution provider: the passes for it, and the constraints of its own kernels for fused operators.

    Attributes:
        lowering_passes: Run after `fusions`.
        contrib_constraints: Operators with a kernel in com.microsoft; all others run as `sd_ort` operators.
        float32_inputs: Inputs (operator, index) that stay in float32 in half precision.
        dtypes: Precisions that a model for this target can have.
        half_storage_only: Half precision is for stored weights only; opening a session casts them to float32.
        bfloat16_passes: Replace `lowering_passes` in bfloat16.
        newest_opset: Newest opset that its kernels are registered for; None if it is ONNX Runtime's newest.
        fast_opsets: Operators that have a faster kernel in older opsets, and the newest of these.
    """

    name: str
    lowering_passes: tuple[Pass, ...] = ()
    contrib_constraints: Mapping[str, KernelConstraint] = field(default_factory=dict)
    fusions: tuple[Pass, ...] = FUSIONS
    float32_inputs: frozenset[tuple[str, int]] = frozenset()
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")
    half_storage_only: bool = False
    bfloat16_passes: tuple[Pass, ...] = ()
    newest_opset: int | None = None
    fast_opsets: Mapping[str, int] = field(default_factory=dict)

    def passes_for(self, dtype: str) -> tuple[Pass, ...]:
        """Return the lowering passes of a dtype."""
        return self.bfloat16_passes if dtype == "bfloat16" and self.bfloat16_passes else self.lowering_passes


_FLOAT32_INPUTS = frozenset((operator.name, i) for operator in OPERATORS for i in operator.float32_inputs)

_NO_SDPA = inline_fused_ops("ScaledDotProductAttention")  # no provider has a kernel

# TRANSFORMER_FUSIONS write RMSNormalization of opset 23, for which rocm and migraphx have no kernels.
PORTABLE = Target(
    "portable",
    fusions=(*FUSIONS, *TRANSFORMER_FUSIONS),
    lowering_passes=(grouped_sdpa(), grouped_attention(), conv_factor.PASS),
)

# onnxruntime 1.31's SkipLayerNormalization and InstanceNormalization are slower than the kernels of the op library, and
# than function bodies without it (results/cpu_unet_sd15.md); its attention is faster.
CPU = Target(
    "cpu",
    fusions=(*FUSIONS, *TRANSFORMER_FUSIONS),
    lowering_passes=(
        standard_sdpa(_uncapped),
        _NO_SDPA,
        standard_attention(_long_keys),
        winograd_conv.PASS,
        conv_factor.PASS,
        fused_conv.PASS,
        contrib_kernels.PASS,
        linear_add.CPU,
    ),
    contrib_constraints={"QuickGelu": _any, "MultiHeadAttention": _square_if_causal, "RotaryEmbedding": _any},
    half_storage_only=True,  # its kernels compute half precision in float32, with casts around each
    fast_opsets={
        "AveragePool": 18
    },  # onnxruntime 1.31's kernel for dilated windows of few channels takes 7 times as long
    bfloat16_passes=(
        _NO_SDPA,
        bfloat16_attention.PASS,
        grouped_heads.BFLOAT16_PASS,
        pack_qkv.BFLOAT16_PASS,
        standard_attention(_long_keys),
        bfloat16_matmul_conv.PASS,
        bfloat16_layout.PASS,
        bfloat16_activations.PASS,
    ),
)

# onnxruntime 1.31's schema of com.microsoft NhwcConv has no bfloat16.
_NO_BFLOAT16 = ("float32", "float16")

# All kernels of the CUDA provider for fused operators.
CUDA_CONTRIB: Mapping[str, KernelConstraint] = {
    "GroupNorm": _even_channels_per_group,
    "SkipGroupNorm": _even_channels_per_group,
    "BiasSplitGelu": _cuda_gelu_width,
    "BiasAdd": _three_axes,
    "SkipLayerNormalization": _full_skip,
    "MultiHeadAttention": _square_if_causal,
    "NhwcConv": _without_epilogue,
    "QuickGelu": _any,
}

# Uses the kernels of CUDA_CONTRIB that are faster than ours on an H200 (results/gpu_step.md).
CUDA = Target(
    "cuda",
    fusions=(*FUSIONS, *TRANSFORMER_FUSIONS),
    lowering_passes=(
        standard_sdpa(_narrow_heads),
        _NO_SDPA,
        swiglu.PASS,
        swiglu.PACK,
        split_product.PASS,
        rotary_qkv.PASS,
        grouped_attention(_narrow_heads),
        channel_norm.PASS,
        adaptive_norm.PASS,
        conv_factor.PASS,
        nhwc_layout.PASS,
        fold_bias.PASS,
        pack_qkv.PASS,
        split_concat.PASS,
        linear_add.PASS,
        upsample_nearest.PASS,
        subpixel_conv.PASS,
        layer_norm.PASS,
    ),
    contrib_constraints={
        **{name: CUDA_CONTRIB[name] for name in ("NhwcConv", "QuickGelu", "SkipLayerNormalization")},
        "MultiHeadAttention": _narrow_heads,
    },
    float32_inputs=_FLOAT32_INPUTS,
    dtypes=_NO_BFLOAT16,
)

# MultiHeadAttention does not run with any of our inputs: the wheel is built without Composable Kernel.
# LayerNormalization is wrong on RDNA (`rocm_kernels.WRONG_ON_RDNA`); SkipLayerNormalization is not.
ROCM = Target(
    "rocm",
    lowering_passes=(
        _NO_SDPA,
        conv_factor.PASS,
        nhwc_layout.PASS,
        fold_bias.PASS,
        pack_qkv.PASS,
        upsample_nearest.PASS,
        subpixel_conv.PASS,
        layer_norm.PASS,
    ),
    contrib_constraints={name: constraint for name, constraint in CUDA_CONTRIB.items() if name != "MultiHeadAttention"},
    float32_inputs=_FLOAT32_INPUTS,
    dtypes=_NO_BFLOAT16,
    newest_opset=NEWEST_OPSET,
)

MIGRAPHX = Target(
    "migraphx",
    lowering_passes=(_NO_SDPA, conv_factor.PASS, nhwc_layout.PASS),
    contrib_constraints={
        "GroupNorm": _channels_last,
        "SkipLayerNormalization": _any,
        "MultiHeadAttention": _square_if_causal,
        "NhwcConv": _any,
        "QuickGelu": _any,
    },
    fusions=tuple(each for each in FUSIONS if each.name not in {"skip_group_norm", "bias_add", "bias_split_gelu"}),
    dtypes=_NO_BFLOAT16,
)

# The sd-ort provider (custom_ops/provider) has only operators of domains `sd_ort` and ai.onnx: contrib schemas are not
# shared with plugins. It has a kernel for each fused operator, and one for GEGLU layers with their MatMul. Its
# normalizations run in place if their input has no other consumer.
HIP = Target(
    "hip",
    fusions=(*FUSIONS, *TRANSFORMER_FUSIONS),
    lowering_passes=(
        transposed_attention.PASS,
        grouped_heads.PASS,
        _NO_SDPA,
        swiglu.PASS,
        swiglu.PACK,
        split_product.PASS,
        rotary_qkv.PASS,
        channel_norm.PASS,
        adaptive_norm.PASS,
        conv_factor.PASS,
        nhwc_layout.PASS,
        fold_bias.PASS,
        pack_qkv.PASS,
        linear_split_gelu.PASS,
        split_concat.PASS,
        linear_add.SHORTCUTS_FIRST,
        upsample_nearest.PASS,
        subpixel_conv.PASS,
        conv_relu.PASS,
        layer_norm.PASS,
    ),
    float32_inputs=_FLOAT32_INPUTS,
)
GPU = replace(HIP, name="gpu")

TARGETS: Mapping[str, Target] = {t.name: t for t in (PORTABLE, CPU, CUDA, ROCM, MIGRAPHX, HIP, GPU)}


def default_target() -> tuple[str, str]:
    """Return the default target and the reason: that of the best GPU provider which runs here, else of the installed
    ONNX Runtime wheel, `portable` without one."""
    if installed_gpus() and installed_wheels() and (choice := choose_provider()).provider != "cpu":
        return target_of(choice.provider), f"{choice.provider} is {choice.reason} (--target names another)"
    wheels = installed_wheels()
    for wheel in wheels:
        if (name := WHEELS[wheel]) is not None:
            return name, f"{wheel} is installed (--target portable makes a folder for any ONNX runtime)"
    return PORTABLE.name, f"{' and '.join(wheels) or 'no onnxruntime wheel'} is installed (--target names another)"
