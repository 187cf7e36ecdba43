"""diffusers' pipeline classes of SDXL, ControlNets and latent consistency models, with their arguments and defaults.

What the arguments mean is in `pipelines.request.Request`. tests/parity compares the signatures with those of the
diffusers that is installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sd_ort
from sd_ort.core.pipeline_folder import read_index
from sd_ort.pipelines.arguments import GUIDED_TENSORS, XL_GUIDANCE, XL_IMAGE_TENSORS, XL_TENSORS
from sd_ort.pipelines.call_signature import diffusers_call
from sd_ort.pipelines.image_to_image import StableDiffusionImg2ImgPipeline, StableDiffusionInpaintPipeline
from sd_ort.pipelines.load_options import open_announced
from sd_ort.pipelines.text_to_image import StableDiffusionPipeline
from sd_ort.runtime.provider_choice import AUTO


class StableDiffusionXLPipeline(StableDiffusionPipeline):
    """Text to image with SDXL."""

    DEFAULT_SIZE_UNLESS_BOTH = False
    _callback_tensor_inputs: tuple[str, ...] = ("latents", "prompt_embeds", "add_text_embeds", "add_time_ids")

    __call__ = diffusers_call(
        "prompt prompt_2 height width {schedule} denoising_end guidance_scale negative_prompt negative_prompt_2 "
        "{noise} {embeds} {pooled} {adapter} {output} guidance_rescale {sizes} {negative_sizes} {callback} kwargs",
        guidance_scale=XL_GUIDANCE,
    )


class StableDiffusionXLImg2ImgPipeline(StableDiffusionImg2ImgPipeline):
    """Image to image with SDXL and its refiner."""

    _callback_tensor_inputs: tuple[str, ...] = ("latents", "prompt_embeds", "add_text_embeds", "add_time_ids")

    __call__ = diffusers_call(
        "prompt prompt_2 image strength {schedule} denoising_start denoising_end guidance_scale negative_prompt "
        "negative_prompt_2 {noise} {embeds} {pooled} {adapter} {output} guidance_rescale {sizes} {negative_sizes} "
        "{aesthetic} {callback} kwargs",
        strength=0.3,
        guidance_scale=XL_GUIDANCE,
    )


class StableDiffusionXLInpaintPipeline(StableDiffusionInpaintPipeline):
    """Inpainting with SDXL."""

    _callback_tensor_inputs: tuple[str, ...] = (
        "latents", "prompt_embeds", "add_text_embeds", "add_time_ids", "mask", "masked_image_latents",
    )  # fmt: skip

    __call__ = diffusers_call(
        "prompt prompt_2 image mask_image masked_image_latents height width padding_mask_crop strength {schedule} "
        "denoising_start denoising_end guidance_scale negative_prompt negative_prompt_2 {noise} {embeds} {pooled} "
        "{adapter} {output} guidance_rescale {sizes} {negative_sizes} {aesthetic} {callback} kwargs",
        strength=0.9999,
    )


class StableDiffusionControlNetPipeline(StableDiffusionPipeline):
    """Text to image with ControlNets for SD 1.x and 2.x. `image`: the control image."""

    _callback_tensor_inputs: tuple[str, ...] = (*GUIDED_TENSORS, "image")

    __call__ = diffusers_call(
        "prompt image height width {schedule} guidance_scale negative_prompt {noise} {embeds} {adapter} {output} "
        "{control} {callback} kwargs",
        controlnet_conditioning_scale=1.0,
    )


class StableDiffusionControlNetImg2ImgPipeline(StableDiffusionImg2ImgPipeline):
    """Image to image with ControlNets for SD 1.x and 2.x."""

    _callback_tensor_inputs: tuple[str, ...] = (*GUIDED_TENSORS, "control_image")

    __call__ = diffusers_call(
        "prompt image control_image height width strength num_inference_steps guidance_scale negative_prompt {noise} "
        "{embeds} {adapter} {output} {control} {callback} kwargs",
        strength=0.8,
        controlnet_conditioning_scale=0.8,
    )


class StableDiffusionControlNetInpaintPipeline(StableDiffusionInpaintPipeline):
    """Inpainting with ControlNets for SD 1.x and 2.x."""

    SIZE_OF_IMAGE = True
    _callback_tensor_inputs: tuple[str, ...] = (*GUIDED_TENSORS, "control_image", "mask", "masked_image_latents")

    __call__ = diffusers_call(
        "prompt image mask_image control_image height width padding_mask_crop strength num_inference_steps "
        "guidance_scale negative_prompt {noise} {embeds} {adapter} {output} {control} {callback} kwargs",
        strength=1.0,
        controlnet_conditioning_scale=0.5,
    )


class StableDiffusionXLControlNetPipeline(StableDiffusionXLPipeline):
    """Text to image with ControlNets for SDXL. `image`: the control image."""

    _callback_tensor_inputs: tuple[str, ...] = (*XL_TENSORS, "image")

    __call__ = diffusers_call(
        "prompt prompt_2 image height width {schedule} denoising_end guidance_scale negative_prompt negative_prompt_2 "
        "{noise} {embeds} {pooled} {adapter} {output} {control} {sizes} {negative_sizes} {callback} kwargs",
        guidance_scale=XL_GUIDANCE,
        controlnet_conditioning_scale=1.0,
    )


class StableDiffusionXLControlNetImg2ImgPipeline(StableDiffusionXLImg2ImgPipeline):
    """Image to image with ControlNets for SDXL."""

    _callback_tensor_inputs: tuple[str, ...] = (*XL_IMAGE_TENSORS, "control_image")

    __call__ = diffusers_call(
        "prompt prompt_2 image control_image height width strength num_inference_steps guidance_scale negative_prompt "
        "negative_prompt_2 {noise} {embeds} {pooled} {adapter} {output} {control} {sizes} {negative_sizes} "
        "{aesthetic} {callback} kwargs",
        strength=0.8,
        guidance_scale=XL_GUIDANCE,
        controlnet_conditioning_scale=0.8,
    )


class StableDiffusionXLControlNetInpaintPipeline(StableDiffusionXLInpaintPipeline):
    """Inpainting with ControlNets for SDXL."""

    SIZE_OF_IMAGE = True
    _callback_tensor_inputs: tuple[str, ...] = (*XL_IMAGE_TENSORS, "mask", "masked_image_latents", "control_image")

    __call__ = diffusers_call(
        "prompt prompt_2 image mask_image control_image height width padding_mask_crop strength num_inference_steps "
        "denoising_start denoising_end guidance_scale negative_prompt negative_prompt_2 {noise} {embeds} {adapter} "
        "{pooled} {output} {control} guidance_rescale {sizes} {aesthetic} {callback} kwargs",
        strength=0.9999,
        guidance_scale=XL_GUIDANCE,
        controlnet_conditioning_scale=1.0,
    )


class LatentConsistencyModelPipeline(StableDiffusionPipeline):
    """Text to image with latent consistency models."""

    DEFAULT_SIZE_UNLESS_BOTH = False
    CAN_INTERRUPT = False
    CHANGES_LAST_LATENTS = False
    _callback_tensor_inputs: tuple[str, ...] = ("latents", "prompt_embeds", "w_embedding")

    __call__ = diffusers_call(
        "prompt height width num_inference_steps original_inference_steps timesteps guidance_scale "
        "num_images_per_prompt generator latents prompt_embeds {adapter} {output} {callback} kwargs",
        num_inference_steps=4,
        guidance_scale=8.5,
    )


class LatentConsistencyModelImg2ImgPipeline(StableDiffusionImg2ImgPipeline):
    """Image to image with latent consistency models."""

    CAN_INTERRUPT = False
    CHANGES_LAST_LATENTS = False
    STRENGTH_IN_SCHEDULER = True
    _callback_tensor_inputs: tuple[str, ...] = ("latents", "prompt_embeds", "w_embedding")

    __call__ = diffusers_call(
        "prompt image num_inference_steps strength original_inference_steps timesteps guidance_scale "
        "num_images_per_prompt generator latents prompt_embeds {adapter} {output} {callback} kwargs",
        num_inference_steps=4,
        strength=0.8,
        guidance_scale=8.5,
    )


class AutoPipelineMixin:
    """Loading of the class that the folder's model_index.json names, or of its form with PAG."""

    TASK: str

    @classmethod
    def from_pretrained(
        cls, model: Path | str, provider: str = AUTO, scheduler: Any = None, *, enable_pag: bool = False, **options: Any
    ) -> Any:  # fmt: skip
        """Load a model as `StableDiffusionPipeline.from_pretrained` does.

        enable_pag: whether to use perturbed attention guidance, in the layers `pag_applied_layers`.
        """
        if enable_pag:
            guided: Any = getattr(sd_ort, f"StableDiffusionPAG{cls.TASK}Pipeline")
            return guided.from_pretrained(model, provider, scheduler, **options)
        folder, provider = open_announced(model, provider, options.pop("config", None), options)
        if (name := str(read_index(folder).get("_class_name"))) in sd_ort.TRANSFORMER_PIPELINES:
            family: Any = getattr(sd_ort, sd_ort.transformer_pipeline(name, cls.TASK))
            return family.from_pretrained(folder, provider, scheduler, **options)
        parent: Any = super()
        return parent.from_pretrained(folder, provider, scheduler, **options)

    @classmethod
    def from_pipe(cls, pipeline: Any, *, enable_pag: bool = False, **options: Any) -> Any:
        """Return a pipeline over another's folder and sessions. `enable_pag` as in `from_pretrained`."""
        if enable_pag:
            guided: Any = getattr(sd_ort, f"StableDiffusionPAG{cls.TASK}Pipeline")
            return guided.from_pipe(pipeline, **options)
        parent: Any = super()
        return parent.from_pipe(pipeline, **options)


class AutoPipelineForText2Image(AutoPipelineMixin, StableDiffusionPipeline):
    """Text to image with the class that the folder's model_index.json names."""


class AutoPipelineForImage2Image(AutoPipelineMixin, StableDiffusionImg2ImgPipeline):
    """Image to image with the class that the folder's model_index.json names."""


class AutoPipelineForInpainting(AutoPipelineMixin, StableDiffusionInpaintPipeline):
    """Inpainting with the class that the folder's model_index.json names."""
