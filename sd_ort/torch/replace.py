"""`optimize` and `restore`: which modules of a pipeline run on our operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from diffusers.models.activations import GEGLU
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import Attention
from diffusers.models.autoencoders.vae import Decoder, Encoder
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.unets.unet_2d_blocks import CrossAttnUpBlock2D, UpBlock2D
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from diffusers.models.upsampling import Upsample2D
from torch import nn

from sd_ort.core.errors import InputError
from sd_ort.torch import kernels, status
from sd_ort.torch.modules import attention, images, packing, resnet, transformer, up, whole, winograd

Level = Literal["auto", "performance", "memory"]
LEVELS = ("auto", "performance", "memory")
Target = TypeVar("Target")

# diffusers' class -> the subclass in its place, and why a module cannot take it.
_CLASSES: dict[type[nn.Module], tuple[type[nn.Module], Callable[[Any], str | None]]] = {
    ResnetBlock2D: (resnet.FastResnetBlock2D, resnet.refuse),
    BasicTransformerBlock: (transformer.FastBasicTransformerBlock, transformer.refuse_block),
    Transformer2DModel: (transformer.FastTransformer2DModel, transformer.refuse_transformer),
    GEGLU: (transformer.FastGEGLU, lambda _: None),
    Upsample2D: (images.FastUpsample2D, images.refuse_upsample),
    UpBlock2D: (up.FastUpBlock2D, lambda _: None),
    CrossAttnUpBlock2D: (up.FastCrossAttnUpBlock2D, lambda _: None),
}
_ORIGINALS: dict[type[nn.Module], type[nn.Module]] = {
    **{fast: original for original, (fast, _) in _CLASSES.items()},
    images.GroupNormSilu: nn.GroupNorm,
    images.SiluDone: nn.SiLU,
    images.FoldedUpsample2D: Upsample2D,
}
_WITH_LAST_NORM = (UNet2DConditionModel, Encoder, Decoder)
# Attributes of a component: its weights were made channels last; its slicing was turned on.
_FORMAT, _SLICED = "_sd_ort_memory_format", "_sd_ort_sliced"


def optimize(target: Target, level: Level = "auto", graph: bool | None = None) -> Target:
    """Lets a diffusers pipeline or module (SD 1.x, 2.x, SDXL, ControlNet, VAE) run on our operators; returns it.

    Parameters stay the same objects with the same values and names. `restore` undoes everything.

    level: "auto" replaces modules and, on a GPU, lays convolution weights channels last. "performance" also lays the
    weights of one input's products side by side (of the time embedding's and the prompt's, the whole model's), keeps
    transformed filters of the float16 convolutions that are faster with them (16/9 of their weights more memory), and
    measures every new shape when it is first met: our kernels, to the file that later runs load, and convolutions
    (`torch.backends.cudnn.benchmark`, which stays on). "memory" takes only kernels without scratch memory and turns on
    the VAE's slicing, an image at a time.

    graph: whether calls of a U-Net and a ControlNet on a GPU are captured in CUDA graphs when the same shapes come a
    second time, and replayed; on unless the level is "memory" (a graph keeps its activations). Calls with gradients,
    autocast, hooks or offloading are not captured: `status().not_captured` counts them by reason. A model that changed
    (LoRA layers and their scales, a processor, weights elsewhere in memory) is captured anew.

    A module that is not known (another class, processor, norm or activation) is left alone: `status()` counts it with
    the reason. Raises InputError for an unknown level, or a target without modules.
    """
    if level not in LEVELS:
        raise InputError(f"unknown level {level!r}: choose one of {', '.join(LEVELS)}.")
    restore(target)
    for component in components(target):
        for module in component.modules():
            _replace(module, level)
            if graph or (graph is None and level != "memory"):
                whole.capture(module)
        for module in component.modules() if level == "performance" else ():
            if type(module) in whole.MODELS:
                resnet.share_time(module)
                attention.share_prompt(module)
            if isinstance(module, transformer.FastGEGLU):
                packing.lay_columns(module.proj)
            if isinstance(module, images.FastUpsample2D):
                module.__class__ = images.FoldedUpsample2D
                if type(component) in whole.MODELS and module.use_conv:
                    winograd.prepare(module.convolution, doubled=True)
            if isinstance(module, resnet.FastResnetBlock2D):
                winograd.prepare(module.conv1)
                winograd.prepare(module.conv2)
        _lay_out(component)
        if level == "memory" and getattr(component, "use_slicing", None) is False:
            component.enable_slicing()  # type: ignore[operator]
            component.__dict__[_SLICED] = True
    _set_kernels(level)
    return target


def restore(target: Target) -> Target:
    """Undoes `optimize`; returns the target. Raises InputError for a target without modules."""
    for component in components(target):
        for module in component.modules():
            _restore(module)
        if component.__dict__.pop(_FORMAT, None):
            component.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        if component.__dict__.pop(_SLICED, None):
            component.disable_slicing()  # type: ignore[operator]
    return target


def components(target: object) -> list[nn.Module]:
    """A pipeline's modules, or the module itself; a compiled one's original. Raises InputError where there is none."""
    if isinstance(target, nn.Module):
        return [getattr(target, "_orig_mod", target)]
    found = [part for part in getattr(target, "components", {}).values() if isinstance(part, nn.Module)]
    if not found:
        raise InputError(f"a {type(target).__name__} holds no modules: give a diffusers pipeline or a torch module.")
    return [getattr(part, "_orig_mod", part) for part in found]


def _replace(module: nn.Module, level: Level) -> None:
    name = type(module).__name__
    if isinstance(module, Attention):
        _replace_processor(module, level)
    if isinstance(module, _WITH_LAST_NORM) and _counted(f"{name}.conv_norm_out", images.refuse_last_norm(module)):
        module.conv_norm_out.__class__ = images.GroupNormSilu
        module.conv_act.__class__ = images.SiluDone
    if type(module) in _CLASSES:
        fast, refuse = _CLASSES[type(module)]
        if _counted(name, refuse(module)):
            module.__class__ = fast
    elif isinstance(module, tuple(_CLASSES)) and type(module) not in _ORIGINALS:
        status.left_alone[name, "a subclass of what is known"] += 1
    elif module.__module__.startswith("diffusers.") and not isinstance(module, _KNOWN) and _normalizes(module):
        status.left_alone[name, "its norms are its own"] += 1


# Modules that hold norms of modules handled above, or none that matter.
_KNOWN = (Attention, *_WITH_LAST_NORM, *_CLASSES)


def _normalizes(module: nn.Module) -> bool:
    """Whether a norm is the module's own child: work that an operator of ours might do."""
    return any(isinstance(child, nn.GroupNorm | nn.LayerNorm) for child in module.children())


def _counted(name: str, reason: str | None) -> bool:
    """Counts a module as replaced, or left alone for a reason; whether it is to be replaced."""
    if reason is None:
        status.replaced[name] += 1
    else:
        status.left_alone[name, reason] += 1
    return reason is None


def _replace_processor(attn: Attention, level: Level) -> None:
    if not _counted("Attention", attention.refuse(attn)):
        return
    stacked = level == "performance" and packing.lay_products(attn)
    attn.processor = attention.FastAttnProcessor(attn.processor, stacked)


def _restore(module: nn.Module) -> None:
    whole.release(module)
    resnet.own_time(module)
    winograd.release(module)
    packing.lay_rows(module)
    if type(module) in _ORIGINALS:
        module.__class__ = _ORIGINALS[type(module)]
    if isinstance(module, Attention) and isinstance(module.processor, attention.FastAttnProcessor):
        if module.processor.stacked:
            packing.give_own_memory(packing.products(module))
        module.processor = module.processor.replaced


def _lay_out(component: nn.Module) -> None:
    """Weights of convolutions channels last, on a GPU: its libraries' fast kernels read them so."""
    on_gpu = any(parameter.device.type == "cuda" for parameter in component.parameters())
    if on_gpu and any(isinstance(module, nn.Conv2d) for module in component.modules()):
        component.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        component.__dict__[_FORMAT] = True


def _set_kernels(level: Level) -> None:
    """What a level asks of the GPU's kernels, for the whole process."""
    try:
        found = kernels.gpu_kernels()
    except kernels.Refused:
        return
    assert isinstance(found, kernels.GpuKernels)
    found.without_workspace = level == "memory"
    if level == "performance":
        torch.backends.cudnn.benchmark = True
    found.tune(level == "performance")
