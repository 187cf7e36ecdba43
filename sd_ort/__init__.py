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
# diffusers' other names for them: a folder says itself which family it is of, and whether it has a ControlNet.
KINDS = ("XL", "ControlNet", "XLControlNet")
ALSO = {f"StableDiffusion{kind}{does}Pipeline": f"StableDiffusion{does}Pipeline"
        for kind in KINDS for does in ("", "Img2Img", "Inpaint")}  # fmt: skip
ALSO |= {
    "AutoPipelineForText2Image": "StableDiffusionPipeline",
    "AutoPipelineForImage2Image": "StableDiffusionImg2ImgPipeline",
    "AutoPipelineForInpainting": "StableDiffusionInpaintPipeline",
    "LatentConsistencyModelPipeline": "StableDiffusionPipeline",
    "LatentConsistencyModelImg2ImgPipeline": "StableDiffusionImg2ImgPipeline",
}


def __getattr__(name: str) -> Any:
    own = ALSO.get(name, name)
    if own in MODULES:
        return getattr(importlib.import_module(MODULES[own]), own)
    raise AttributeError(f"module 'sd_ort' has no attribute {name!r}")
