"""Stable Diffusion through ONNX Runtime: export, fuse, run and measure."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sd_ort.pipelines.image_to_image import StableDiffusionImg2ImgPipeline, StableDiffusionInpaintPipeline
    from sd_ort.pipelines.text_to_image import StableDiffusionPipeline
    from sd_ort.pipelines.transformer_pipelines import FluxPipeline, StableDiffusion3Pipeline

__all__ = [
    "FluxPipeline",
    "StableDiffusion3Pipeline",
    "StableDiffusionImg2ImgPipeline",
    "StableDiffusionInpaintPipeline",
    "StableDiffusionPipeline",
]
__version__ = "0.1.0"

# Where each public name lives; imported when it is first asked for, since the modules take seconds.
MODULES = {
    "StableDiffusionPipeline": "sd_ort.pipelines.text_to_image",
    "StableDiffusionImg2ImgPipeline": "sd_ort.pipelines.image_to_image",
    "StableDiffusionInpaintPipeline": "sd_ort.pipelines.image_to_image",
    "StableDiffusion3Pipeline": "sd_ort.pipelines.transformer_pipelines",
    "FluxPipeline": "sd_ort.pipelines.transformer_pipelines",
}
# diffusers' other classes. from_pretrained of any class returns the one of the folder's family for the same task.
FAMILIES = [f"StableDiffusion{family}{task}Pipeline"
            for family in ("XL", "ControlNet", "XLControlNet") for task in ("", "Img2Img", "Inpaint")]  # fmt: skip
FAMILIES += ["LatentConsistencyModelPipeline", "LatentConsistencyModelImg2ImgPipeline"]
MODULES |= {f"{family}{task}Pipeline": "sd_ort.pipelines.transformer_image_to_image"
            for family in ("StableDiffusion3", "Flux") for task in ("Img2Img", "Inpaint")}  # fmt: skip
FAMILIES += ["AutoPipelineForText2Image", "AutoPipelineForImage2Image", "AutoPipelineForInpainting"]
MODULES |= dict.fromkeys(FAMILIES, "sd_ort.pipelines.families")


def __getattr__(name: str) -> Any:
    if name in MODULES:
        return getattr(importlib.import_module(MODULES[name]), name)
    if name.endswith("PAGPipeline") or "PAGImg2Img" in name or "PAGInpaint" in name:
        raise AttributeError(f"sd_ort has no {name}: perturbed attention changes the UNet's graph, which is fixed.")
    raise AttributeError(f"module 'sd_ort' has no attribute {name!r}")
