"""`optimize` and `restore`: replace modules of a diffusers pipeline by subclasses that call the sd_ort operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from diffusers.models.activations import GEGLU
from diffusers.models.attention import BasicTransformerBlock, JointTransformerBlock
from diffusers.models.attention_processor import Attention
from diffusers.models.autoencoders.vae import Decoder, Encoder
from diffusers.models.normalization import (
    AdaLayerNormContinuous,
    AdaLayerNormZero,
    AdaLayerNormZeroSingle,
    SD35AdaLayerNormZeroX,
)
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers import transformer_flux, transformer_flux2, transformer_krea2
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock
from diffusers.models.transformers.transformer_z_image import FeedForward as ZFeedForward
from diffusers.models.transformers.transformer_z_image import ZImageTransformerBlock
from diffusers.models.unets.unet_2d_blocks import CrossAttnUpBlock2D, UpBlock2D
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from diffusers.models.upsampling import Upsample2D
from torch import nn

from sd_ort.core.errors import InputError
from sd_ort.torch import kernels, status
from sd_ort.torch.modules import (
    attention,
    captured_models,
    joint_attention,
    last_norm,
    modulated_norms,
    resnet,
    transformer,
    up_blocks,
    upsample,
    weight_packing,
    winograd,
)
from sd_ort.torch.modules import diffusion_transformers as dit

Level = Literal["auto", "performance", "memory"]
LEVELS = ("auto", "performance", "memory")
Target = TypeVar("Target")

# diffusers' class -> the subclass that replaces it, and a function that returns why a module is not replaced, or None.
_ALWAYS: Callable[[Any], str | None] = lambda _: None  # noqa: E731
_REPLACEMENTS: dict[type[nn.Module], tuple[type[nn.Module], Callable[[Any], str | None]]] = {
    ResnetBlock2D: (resnet.FastResnetBlock2D, resnet.unsupported_reason),
    BasicTransformerBlock: (transformer.FastBasicTransformerBlock, transformer.unsupported_block_reason),
    Transformer2DModel: (transformer.FastTransformer2DModel, transformer.unsupported_transformer_reason),
    GEGLU: (transformer.FastGEGLU, _ALWAYS),
    Upsample2D: (upsample.FastUpsample2D, upsample.unsupported_reason),
    UpBlock2D: (up_blocks.FastUpBlock2D, _ALWAYS),
    CrossAttnUpBlock2D: (up_blocks.FastCrossAttnUpBlock2D, _ALWAYS),
    # diffusion transformers
    AdaLayerNormZero: (modulated_norms.FastAdaLayerNormZero, _ALWAYS),
    AdaLayerNormZeroSingle: (modulated_norms.FastAdaLayerNormZeroSingle, _ALWAYS),
    AdaLayerNormContinuous: (modulated_norms.FastAdaLayerNormContinuous, _ALWAYS),
    SD35AdaLayerNormZeroX: (modulated_norms.FastSD35AdaLayerNormZeroX, _ALWAYS),
    JointTransformerBlock: (dit.FastJointTransformerBlock, _ALWAYS),
    transformer_flux.FluxTransformerBlock: (dit.FastFluxTransformerBlock, _ALWAYS),
    transformer_flux.FluxSingleTransformerBlock: (dit.FastFluxSingleTransformerBlock, _ALWAYS),
    transformer_flux2.Flux2TransformerBlock: (dit.FastFlux2TransformerBlock, _ALWAYS),
    transformer_flux2.Flux2SingleTransformerBlock: (dit.FastFlux2SingleTransformerBlock, _ALWAYS),
    transformer_flux2.Flux2SwiGLU: (dit.FastFlux2SwiGLU, _ALWAYS),
    QwenImageTransformerBlock: (dit.FastQwenImageTransformerBlock, _ALWAYS),
    ZImageTransformerBlock: (dit.FastZImageTransformerBlock, _ALWAYS),
    ZFeedForward: (dit.FastZFeedForward, _ALWAYS),
    transformer_krea2.Krea2TransformerBlock: (dit.FastKrea2TransformerBlock, _ALWAYS),
    transformer_krea2.Krea2SwiGLU: (dit.FastKrea2SwiGLU, _ALWAYS),
}
_ORIGINALS: dict[type[nn.Module], type[nn.Module]] = {
    **{fast: original for original, (fast, _) in _REPLACEMENTS.items()},
    last_norm.GroupNormSilu: nn.GroupNorm,
    last_norm.FusedSilu: nn.SiLU,
    upsample.FusedUpsampleConv2D: Upsample2D,
}
_WITH_LAST_NORM = (UNet2DConditionModel, Encoder, Decoder)
# Classes that handle norms themselves, or whose norms are handled by one of these.
_SUPPORTED = (Attention, *joint_attention.ATTENTIONS, *_WITH_LAST_NORM, *_REPLACEMENTS)
# Attributes of a component: its weights were converted to channels last; its slicing was enabled.
_CHANNELS_LAST, _SLICING = "_sd_ort_memory_format", "_sd_ort_sliced"


def optimize(target: Target, level: Level = "auto", graph: bool | None = None) -> Target:
    """Replace modules of a diffusers pipeline or module, and return the target.

    Models are SD 1.x, 2.x, SDXL, ControlNet, the VAE, and the transformers of SD 3, FLUX.1 and 2, Z-Image, Qwen-Image
    and Krea 2. Parameters stay the same objects with the same values and names. `restore` undoes everything. A module
    of another class, or with another processor, norm or activation, is not replaced: `status()` counts it with the
    reason.

    Args:
        target: A diffusers pipeline or a torch module.
        level: "auto" replaces modules and, on a GPU, converts the weights of convolutions to channels last.
            "performance" also packs the weights of layers that read one input (for the time embedding and the prompt,
            of the whole model). It caches transformed filters of the float16 convolutions that are faster with them
            (16/9 of the memory of their weights in addition). It measures every new shape at its first call: sd_ort
            kernels, into the file that later processes load, and convolutions (`torch.backends.cudnn.benchmark`, which
            stays on).
            "memory" runs only kernels without scratch memory, and enables slicing in the VAE (one image at a time).
        graph: Whether calls of a UNet and a ControlNet on a GPU are captured in CUDA graphs at the second call of the
            same shapes, and replayed. Default: on unless the level is "memory" (a graph retains its activations).
            Calls with gradients, autocast, hooks or offloading are not captured: `status().not_captured` counts them by
            reason. A model that changed (LoRA layers and their scales, a processor, moved weights) is captured again.

    Raises:
        InputError: The level is unknown, the target has no modules, or it has a transformer without any module that
            can be replaced. The target is then as it was.
    """
    if level not in LEVELS:
        raise InputError(f"Unknown level {level!r}: choose one of {', '.join(LEVELS)}.")
    restore(target)
    for component in components(target):
        replaced = status.replaced.total()
        for module in component.modules():
            _replace(module, level)
        if _is_transformer(component) and status.replaced.total() == replaced:
            restore(target)
            raise InputError(f"{type(component).__name__} is not supported: optimize pipe.vae alone.")
        for module in component.modules():
            if graph or (graph is None and level != "memory"):
                captured_models.enable_capture(module)
        if level == "performance":
            for module in component.modules():
                _speed_up(module, type(component) in captured_models.MODELS)
        _convert_to_channels_last(component)
        if level == "memory" and getattr(component, "use_slicing", None) is False:
            component.enable_slicing()  # type: ignore[operator]
            component.__dict__[_SLICING] = True
    _configure_kernels(level)
    return target


def restore(target: Target) -> Target:
    """Undo `optimize` and return the target. Raises InputError for a target without modules."""
    for component in components(target):
        for module in component.modules():
            _restore(module)
        if component.__dict__.pop(_CHANNELS_LAST, None):
            component.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        if component.__dict__.pop(_SLICING, None):
            component.disable_slicing()  # type: ignore[operator]
    return target


def components(target: object) -> list[nn.Module]:
    """Return the modules of a pipeline, or the module itself; for a compiled module, the original.

    Raises InputError if there is none.
    """
    if isinstance(target, nn.Module):
        return [getattr(target, "_orig_mod", target)]
    modules = [item for item in getattr(target, "components", {}).values() if isinstance(item, nn.Module)]
    if not modules:
        raise InputError(f"A {type(target).__name__} has no modules: pass a diffusers pipeline or a torch module.")
    return [getattr(module, "_orig_mod", module) for module in modules]


def _replace(module: nn.Module, level: Level) -> None:
    """Replace the class of a module, or the processor of an attention, if it is supported, and count it."""
    name = type(module).__name__
    if joint_attention.is_joint(module):
        if _count(name, joint_attention.unsupported_reason(module)):
            joint_attention.replace(module)
    elif isinstance(module, Attention):
        _replace_processor(module, level)
    if isinstance(module, _WITH_LAST_NORM) and _count(f"{name}.conv_norm_out", last_norm.unsupported_reason(module)):
        module.conv_norm_out.__class__ = last_norm.GroupNormSilu
        module.conv_act.__class__ = last_norm.FusedSilu
    if type(module) in _REPLACEMENTS:
        fast, unsupported_reason = _REPLACEMENTS[type(module)]
        if _count(name, unsupported_reason(module)):
            module.__class__ = fast
    elif isinstance(module, tuple(_REPLACEMENTS)) and type(module) not in _ORIGINALS:
        status.not_replaced[name, "a subclass of a supported class"] += 1
    elif module.__module__.startswith("diffusers.") and not isinstance(module, _SUPPORTED) and _has_norm(module):
        status.not_replaced[name, "an unsupported class with norms"] += 1


def _is_transformer(component: nn.Module) -> bool:
    """Return whether a component is a denoising transformer of diffusers, of a supported family or another one."""
    return type(component).__module__.startswith("diffusers.models.transformers.")


def _has_norm(module: nn.Module) -> bool:
    """Return whether a norm is a direct child of the module: work that an sd_ort operator might do."""
    return any(isinstance(child, nn.GroupNorm | nn.LayerNorm) for child in module.children())


def _count(name: str, unsupported_reason: str | None) -> bool:
    """Count a module as replaced, or as not replaced for a reason. Return whether to replace it."""
    if unsupported_reason is None:
        status.replaced[name] += 1
    else:
        status.not_replaced[name, unsupported_reason] += 1
    return unsupported_reason is None


def _replace_processor(attn: Attention, level: Level) -> None:
    if _count("Attention", attention.unsupported_reason(attn)):
        packed = level == "performance" and weight_packing.pack_qkv(attn)
        attn.processor = attention.FastAttnProcessor(attn.processor, packed)


def _speed_up(module: nn.Module, in_whole_model: bool) -> None:
    """Prepare the weights of a module for level "performance". in_whole_model: it is part of a UNet or ControlNet."""
    if type(module) in captured_models.MODELS:
        resnet.concatenate_time_projections(module)
        attention.concatenate_prompt_projections(module)
    if isinstance(module, transformer.FastGEGLU):
        weight_packing.to_column_major(module.proj)
    if isinstance(module, upsample.FastUpsample2D):
        module.__class__ = upsample.FusedUpsampleConv2D
        if in_whole_model and module.use_conv:
            winograd.prepare(module.convolution, upsample_2x=True)
    if isinstance(module, resnet.FastResnetBlock2D):
        winograd.prepare(module.conv1)
        winograd.prepare(module.conv2)


def _restore(module: nn.Module) -> None:
    captured_models.disable_capture(module)
    resnet.separate_time_projections(module)
    winograd.release(module)
    weight_packing.to_row_major(module)
    if type(module) in _ORIGINALS:
        module.__class__ = _ORIGINALS[type(module)]
    joint_attention.restore(module)
    if isinstance(module, Attention) and isinstance(module.processor, attention.FastAttnProcessor):
        if module.processor.packed:
            weight_packing.unpack_parameters(weight_packing.qkv_weights(module))
        module.processor = module.processor.original


def _convert_to_channels_last(component: nn.Module) -> None:
    """Convert the weights of convolutions on a GPU to channels last, which the fast kernels of its libraries read."""
    on_gpu = any(parameter.device.type == "cuda" for parameter in component.parameters())
    if on_gpu and any(isinstance(module, nn.Conv2d) for module in component.modules()):
        component.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        component.__dict__[_CHANNELS_LAST] = True


def _configure_kernels(level: Level) -> None:
    """Apply a level to the GPU kernels of the whole process."""
    try:
        gpu = kernels.gpu_kernels()
    except kernels.UnsupportedCall:
        return
    assert isinstance(gpu, kernels.GpuKernels)
    gpu.without_workspace = level == "memory"
    if level == "performance":
        torch.backends.cudnn.benchmark = True
    gpu.set_tuning(level == "performance")
