"""Detects the model family of a checkpoint file, or what else the file is, from names and shapes of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sd_ort import demo
from sd_ort.core.errors import InputError

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, "torch.Tensor"]

# Supported families: diffusers' name, or `demo` -> name for the user.
FAMILIES = {
    "v1": "Stable Diffusion 1.x",
    "v2": "Stable Diffusion 2.x",
    "xl_base": "Stable Diffusion XL",
    "xl_refiner": "Stable Diffusion XL refiner",
    "inpainting": "Stable Diffusion 1.x inpainting",
    "inpainting_v2": "Stable Diffusion 2.x inpainting",
    "xl_inpaint": "Stable Diffusion XL inpainting",
    "demo": "sd-ort's demo model",
    "sd35-medium": "Stable Diffusion 3.5 medium",
    "sd35-large": "Stable Diffusion 3.5 large",
    "flux-dev": "FLUX.1 dev",
    "flux-schnell": "FLUX.1 schnell",
    "flux2-klein": "FLUX.2 klein",
    "flux2-dev": "FLUX.2 dev",
    "z-image-turbo": "Z-Image",
    "qwen-image": "Qwen-Image",
    "krea2": "Krea 2",
}
# Family -> hub id of the pipeline whose configs diffusers uses.
HUB_IDS = {
    "v1": "stable-diffusion-v1-5/stable-diffusion-v1-5",
    "v2": "stabilityai/stable-diffusion-2-1",
    "xl_base": "stabilityai/stable-diffusion-xl-base-1.0",
    "xl_refiner": "stabilityai/stable-diffusion-xl-refiner-1.0",
    "inpainting": "stable-diffusion-v1-5/stable-diffusion-inpainting",
    "inpainting_v2": "stabilityai/stable-diffusion-2-inpainting",
    "xl_inpaint": "diffusers/stable-diffusion-xl-1.0-inpainting-0.1",
    "sd35-medium": "stabilityai/stable-diffusion-3.5-medium",
    "sd35-large": "stabilityai/stable-diffusion-3.5-large",
    "flux-dev": "black-forest-labs/FLUX.1-dev",
    "flux-schnell": "black-forest-labs/FLUX.1-schnell",
    "flux2-klein": "black-forest-labs/FLUX.2-klein-4B",
    "flux2-dev": "black-forest-labs/FLUX.2-dev",
    "z-image-turbo": "Tongyi-MAI/Z-Image-Turbo",
    "qwen-image": "Qwen/Qwen-Image",
    "krea2": "krea/Krea-2-Raw",
}
# (diffusers' family, cross_attention_dim) -> family. diffusers tests for single tensors, and calls any other UNet v1 or
# inpainting.
FAMILY_BY_WIDTH = {
    ("v1", 1024): "v2",
    ("v1", 2048): "xl_base",
    ("v1", 1280): "xl_refiner",
    ("inpainting", 1024): "inpainting_v2",
    ("inpainting", 2048): "xl_inpaint",
}
TOKEN_EMBEDDING = "cond_stage_model.transformer.text_model.embeddings.token_embedding.weight"
UNET_INPUT = "model.diffusion_model.input_blocks.0.0.weight"
CROSS_ATTENTION_KEY = "attn2.to_k.weight"


def detect_family(path: Path, tensors: Tensors) -> str:
    """Return the family of a complete checkpoint, a key of `FAMILIES`. Raises InputError for any other file."""
    from diffusers.loaders.single_file_utils import infer_diffusers_model_type

    if description := _describe_other_file(tensors):
        raise InputError(f"{path} is {description}.")
    family = infer_diffusers_model_type(tensors)
    width = next(
        (t.shape[-1] for n, t in tensors.items() if n.startswith("model.") and n.endswith(CROSS_ATTENTION_KEY)), 0
    )
    family = FAMILY_BY_WIDTH.get((family, width), family)
    if TOKEN_EMBEDDING in tensors and tensors[TOKEN_EMBEDDING].shape[0] == demo.VOCABULARY:
        family = "demo"
    if family == "v1" and UNET_INPUT not in tensors:  # diffusers' answer for unknown files
        raise InputError(
            f"{path} holds no Stable Diffusion UNet (it has {len(tensors)} tensors, such as "
            f"{next(iter(tensors), 'none')}): give a whole checkpoint."
        )
    if family not in FAMILIES or UNET_INPUT not in tensors:
        raise InputError(f"{path} is a {family} model: sd-ort runs {', '.join(FAMILIES.values())}.")
    channels = tensors[UNET_INPUT].shape[1]
    if channels not in (4, 9):
        raise InputError(f"{path} has a UNet of {channels} input channels: sd-ort runs 4, and 9 for inpainting.")
    return family


def _describe_other_file(tensors: Tensors) -> str | None:
    """Return what a file is if it is no complete checkpoint, with advice; else None."""
    names = list(tensors)

    def has(*parts: str) -> bool:
        return any(part in name for name in names for part in parts)

    if has("lora_down", "lora_up", "lora_A", "lora_B", "lora.down", "lora.up", "hada_w1", "lokr_w1", "dora_scale"):
        return "a LoRA, which goes on top of a model: draw with it as `sd-ort generate --model DIR --lora FILE`"
    if has("control_model.", "controlnet_cond_embedding", "input_hint_block"):
        return "a ControlNet: give its diffusers folder to `sd-ort export MODEL OUT --controlnet DIR`"
    if has("emb_params", "string_to_param") or {"clip_l", "clip_g"} & set(names):
        return "a textual inversion embedding, not a model: load it with a pipeline's load_textual_inversion"
    if has("joint_blocks.", "double_blocks.", "double_stream", "single_blocks.", "adaLN_modulation"):
        families = "FLUX.1, FLUX.2, Z-Image, Qwen-Image, Krea 2 and SD 3.5"
        return f"a diffusion transformer of a family that sd-ort does not run: it runs {families}"
    if UNET_INPUT in tensors:
        return None
    if has("decoder.conv_in.weight"):
        return "a VAE, not a whole model: give it with --vae beside one"
    if has("down_blocks.0.resnets.0."):
        return "a UNet alone, with diffusers' names: give the whole diffusers folder it belongs to"
    if has("text_model.encoder.layers.", "resblocks."):
        return "a text encoder, not a whole model: give the checkpoint it belongs to"
    return None
