"""Stable Diffusion through ONNX Runtime: export, fuse, run and measure."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sd_ort.pipelines.first_block_cache import FirstBlockCacheConfig
    from sd_ort.pipelines.image_to_image import StableDiffusionImg2ImgPipeline, StableDiffusionInpaintPipeline
    from sd_ort.pipelines.mag_cache import MagCacheConfig
    from sd_ort.pipelines.taylor_seer_cache import TaylorSeerCacheConfig
    from sd_ort.pipelines.text_to_image import StableDiffusionPipeline
    from sd_ort.pipelines.transformer_flux import FluxPipeline
    from sd_ort.pipelines.transformer_flux2 import Flux2KleinPipeline, Flux2Pipeline
    from sd_ort.pipelines.transformer_kontext import FluxKontextPipeline
    from sd_ort.pipelines.transformer_krea2 import Krea2Pipeline
    from sd_ort.pipelines.transformer_qwen_edit import QwenImageEditPipeline, QwenImageEditPlusPipeline
    from sd_ort.pipelines.transformer_qwen_image import QwenImagePipeline
    from sd_ort.pipelines.transformer_sd3 import StableDiffusion3Pipeline
    from sd_ort.pipelines.transformer_z_image import ZImagePipeline

__all__ = [
    "FirstBlockCacheConfig",
    "Flux2KleinPipeline",
    "Flux2Pipeline",
    "FluxKontextPipeline",
    "FluxPipeline",
    "Krea2Pipeline",
    "MagCacheConfig",
    "QwenImageEditPipeline",
    "QwenImageEditPlusPipeline",
    "QwenImagePipeline",
    "StableDiffusion3Pipeline",
    "StableDiffusionImg2ImgPipeline",
    "StableDiffusionInpaintPipeline",
    "StableDiffusionPipeline",
    "TaylorSeerCacheConfig",
    "ZImagePipeline",
]
__version__ = "1.0.0"

# Where each public name lives; imported when it is first asked for, since the modules take seconds.
MODULES = {
    "StableDiffusionPipeline": "sd_ort.pipelines.text_to_image",
    "StableDiffusionImg2ImgPipeline": "sd_ort.pipelines.image_to_image",
    "StableDiffusionInpaintPipeline": "sd_ort.pipelines.image_to_image",
    "StableDiffusion3Pipeline": "sd_ort.pipelines.transformer_sd3",
    "FluxPipeline": "sd_ort.pipelines.transformer_flux",
    "Flux2KleinPipeline": "sd_ort.pipelines.transformer_flux2",
    "Flux2Pipeline": "sd_ort.pipelines.transformer_flux2",
    "FluxKontextPipeline": "sd_ort.pipelines.transformer_kontext",
    "ZImagePipeline": "sd_ort.pipelines.transformer_z_image",
    "QwenImagePipeline": "sd_ort.pipelines.transformer_qwen_image",
    "QwenImageEditPipeline": "sd_ort.pipelines.transformer_qwen_edit",
    "QwenImageEditPlusPipeline": "sd_ort.pipelines.transformer_qwen_edit",
    "Krea2Pipeline": "sd_ort.pipelines.transformer_krea2",
    "FirstBlockCacheConfig": "sd_ort.pipelines.first_block_cache",
    "MagCacheConfig": "sd_ort.pipelines.mag_cache",
    "TaylorSeerCacheConfig": "sd_ort.pipelines.taylor_seer_cache",
}
# diffusers' other classes. from_pretrained of any class returns the one of the folder's family for the same task.
FAMILIES = [f"StableDiffusion{family}{task}Pipeline"
            for family in ("XL", "ControlNet", "XLControlNet") for task in ("", "Img2Img", "Inpaint")]  # fmt: skip
FAMILIES += ["LatentConsistencyModelPipeline", "LatentConsistencyModelImg2ImgPipeline"]
MODULES |= {f"{family}{task}Pipeline": "sd_ort.pipelines.transformer_image_to_image"
            for family in ("StableDiffusion3", "Flux", "QwenImage") for task in ("Img2Img", "Inpaint")}  # fmt: skip
FAMILIES += ["AutoPipelineForText2Image", "AutoPipelineForImage2Image", "AutoPipelineForInpainting"]
MODULES |= dict.fromkeys(FAMILIES, "sd_ort.pipelines.families")
PAG_FAMILIES = [f"StableDiffusion{family}PAG{task}Pipeline"
                for family in ("", "XL") for task in ("", "Img2Img", "Inpaint")]  # fmt: skip
PAG_FAMILIES += [
    f"StableDiffusion{family}Pipeline"
    for family in ("ControlNetPAG", "ControlNetPAGInpaint", "XLControlNetPAG", "XLControlNetPAGImg2Img")
]
MODULES |= dict.fromkeys(PAG_FAMILIES, "sd_ort.pipelines.pag")
# Classes in the model_index.json of folders with a transformer.
TRANSFORMER_PIPELINES = (
    "StableDiffusion3Pipeline", "FluxPipeline", "FluxKontextPipeline", "Flux2KleinPipeline", "ZImagePipeline",
    "QwenImagePipeline", "Krea2Pipeline", "Flux2Pipeline", "QwenImageEditPipeline", "QwenImageEditPlusPipeline",
)  # fmt: skip
# Those that read images in any task but inpainting, and what they are.
IMAGE_READERS = {
    "Flux2KleinPipeline": "FLUX.2 klein", "Flux2Pipeline": "FLUX.2 dev", "FluxKontextPipeline": "FLUX.1 Kontext",
    "QwenImageEditPipeline": "Qwen-Image-Edit", "QwenImageEditPlusPipeline": "Qwen-Image-Edit",
}  # fmt: skip
# Tasks that a class has not, with what to do instead.
MISSING_TASKS = {
    **{(name, "Inpaint"): f"{model} has no inpainting here: describe the change in the prompt, with the image."
       for name, model in IMAGE_READERS.items()},
    ("ZImagePipeline", "Img2Img"): "Z-Image has no image to image here: leave the image out, or use diffusers.",
    ("ZImagePipeline", "Inpaint"): "Z-Image has no inpainting here: leave image and mask out, or use diffusers.",
    ("Krea2Pipeline", "Img2Img"): "Krea 2 has no image to image, nor has diffusers 0.42.1: leave the image out.",
    ("Krea2Pipeline", "Inpaint"): "Krea 2 has no inpainting, nor has diffusers 0.42.1: leave image and mask out.",
}  # fmt: skip


def transformer_pipeline(name: str, task: str) -> str:
    """Return the class for a task ("", "Img2Img" or "Inpaint") of the class in TRANSFORMER_PIPELINES.

    Those of `IMAGE_READERS` read images in any task. Raises InputError for a task that it has not.
    """
    if (name, task) in MISSING_TASKS:
        from sd_ort.core.errors import InputError

        raise InputError(MISSING_TASKS[name, task])
    return name if name in IMAGE_READERS else name.replace("Pipeline", f"{task}Pipeline")


def __getattr__(name: str) -> Any:
    if name in MODULES:
        return getattr(importlib.import_module(MODULES[name]), name)
    raise AttributeError(f"module 'sd_ort' has no attribute {name!r}")
