"""diffusers' pipeline classes of SDXL, ControlNets and latent consistency models, with their arguments and defaults.

What the arguments mean is in `pipelines.request.Request`. tests/parity compares the signatures with those of the
diffusers that is installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sd_ort
from sd_ort.core.pipeline_folder import read_index
from sd_ort.core.progress import announce, print_line
from sd_ort.model_cache import open_model
from sd_ort.pipelines.arguments import GUIDANCE, GUIDED_TENSORS, STEPS, XL_GUIDANCE, XL_IMAGE_TENSORS, XL_TENSORS
from sd_ort.pipelines.image_to_image import StableDiffusionImg2ImgPipeline, StableDiffusionInpaintPipeline
from sd_ort.pipelines.request import Generator, Picture, Prompt, Size, StepCallback
from sd_ort.pipelines.text_to_image import StableDiffusionPipeline
from sd_ort.runtime.provider_choice import AUTO

if TYPE_CHECKING:
    from torch import Tensor


class StableDiffusionXLPipeline(StableDiffusionPipeline):
    """Text to image with SDXL."""

    DEFAULT_SIZE_UNLESS_BOTH = False
    _callback_tensor_inputs: tuple[str, ...] = ("latents", "prompt_embeds", "add_text_embeds", "add_time_ids")

    def __call__(  # type: ignore[override]
        self, prompt: Prompt | None = None, prompt_2: Prompt | None = None, height: int | None = None,
        width: int | None = None, num_inference_steps: int = STEPS, timesteps: Sequence[int] | None = None,
        sigmas: Sequence[float] | None = None, denoising_end: float | None = None, guidance_scale: float = XL_GUIDANCE,
        negative_prompt: Prompt | None = None, negative_prompt_2: Prompt | None = None,
        num_images_per_prompt: int | None = 1, eta: float = 0.0, generator: Generator = None,
        latents: Tensor | None = None, prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None, pooled_prompt_embeds: Tensor | None = None,
        negative_pooled_prompt_embeds: Tensor | None = None, ip_adapter_image: Picture | None = None,
        ip_adapter_image_embeds: Sequence[Tensor] | None = None, output_type: str | None = "pil",
        return_dict: bool = True, cross_attention_kwargs: Mapping[str, Any] | None = None,
        guidance_rescale: float = 0.0, original_size: Size | None = None, crops_coords_top_left: Size = (0, 0),
        target_size: Size | None = None, negative_original_size: Size | None = None,
        negative_crops_coords_top_left: Size = (0, 0), negative_target_size: Size | None = None,
        clip_skip: int | None = None, callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",), *, prompt_syntax: str = "plain",
        progress: bool = True, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Generate images; see `pipelines.request.Request`."""
        return self._generate(locals())


class StableDiffusionXLImg2ImgPipeline(StableDiffusionImg2ImgPipeline):
    """Image to image with SDXL and its refiner."""

    _callback_tensor_inputs: tuple[str, ...] = ("latents", "prompt_embeds", "add_text_embeds", "add_time_ids")

    def __call__(  # type: ignore[override]
        self, prompt: Prompt | None = None, prompt_2: Prompt | None = None, image: Picture | None = None,
        strength: float = 0.3, num_inference_steps: int = STEPS, timesteps: Sequence[int] | None = None,
        sigmas: Sequence[float] | None = None, denoising_start: float | None = None,
        denoising_end: float | None = None, guidance_scale: float = XL_GUIDANCE, negative_prompt: Prompt | None = None,
        negative_prompt_2: Prompt | None = None, num_images_per_prompt: int | None = 1, eta: float = 0.0,
        generator: Generator = None, latents: Tensor | None = None, prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None, pooled_prompt_embeds: Tensor | None = None,
        negative_pooled_prompt_embeds: Tensor | None = None, ip_adapter_image: Picture | None = None,
        ip_adapter_image_embeds: Sequence[Tensor] | None = None, output_type: str | None = "pil",
        return_dict: bool = True, cross_attention_kwargs: Mapping[str, Any] | None = None,
        guidance_rescale: float = 0.0, original_size: Size | None = None, crops_coords_top_left: Size = (0, 0),
        target_size: Size | None = None, negative_original_size: Size | None = None,
        negative_crops_coords_top_left: Size = (0, 0), negative_target_size: Size | None = None,
        aesthetic_score: float = 6.0, negative_aesthetic_score: float = 2.5, clip_skip: int | None = None,
        callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",), *, prompt_syntax: str = "plain",
        progress: bool = True, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Generate images; see `pipelines.request.Request`."""
        return self._generate(locals())


class StableDiffusionXLInpaintPipeline(StableDiffusionInpaintPipeline):
    """Inpainting with SDXL."""

    _callback_tensor_inputs: tuple[str, ...] = (
        "latents", "prompt_embeds", "add_text_embeds", "add_time_ids", "mask", "masked_image_latents",
    )  # fmt: skip

    def __call__(  # type: ignore[override]
        self, prompt: Prompt | None = None, prompt_2: Prompt | None = None, image: Picture | None = None,
        mask_image: Picture | None = None, masked_image_latents: Tensor | None = None, height: int | None = None,
        width: int | None = None, padding_mask_crop: int | None = None, strength: float = 0.9999,
        num_inference_steps: int = STEPS, timesteps: Sequence[int] | None = None, sigmas: Sequence[float] | None = None,
        denoising_start: float | None = None, denoising_end: float | None = None, guidance_scale: float = GUIDANCE,
        negative_prompt: Prompt | None = None, negative_prompt_2: Prompt | None = None,
        num_images_per_prompt: int | None = 1, eta: float = 0.0, generator: Generator = None,
        latents: Tensor | None = None, prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None, pooled_prompt_embeds: Tensor | None = None,
        negative_pooled_prompt_embeds: Tensor | None = None, ip_adapter_image: Picture | None = None,
        ip_adapter_image_embeds: Sequence[Tensor] | None = None, output_type: str | None = "pil",
        return_dict: bool = True, cross_attention_kwargs: Mapping[str, Any] | None = None,
        guidance_rescale: float = 0.0, original_size: Size | None = None, crops_coords_top_left: Size = (0, 0),
        target_size: Size | None = None, negative_original_size: Size | None = None,
        negative_crops_coords_top_left: Size = (0, 0), negative_target_size: Size | None = None,
        aesthetic_score: float = 6.0, negative_aesthetic_score: float = 2.5, clip_skip: int | None = None,
        callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",), *, prompt_syntax: str = "plain",
        progress: bool = True, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Generate images; see `pipelines.request.Request`."""
        return self._generate(locals())


class StableDiffusionControlNetPipeline(StableDiffusionPipeline):
    """Text to image with ControlNets for SD 1.x and 2.x. `image`: the control image."""

    _callback_tensor_inputs: tuple[str, ...] = (*GUIDED_TENSORS, "image")

    def __call__(  # type: ignore[override]
        self, prompt: Prompt | None = None, image: Picture | None = None, height: int | None = None,
        width: int | None = None, num_inference_steps: int = STEPS, timesteps: Sequence[int] | None = None,
        sigmas: Sequence[float] | None = None, guidance_scale: float = GUIDANCE, negative_prompt: Prompt | None = None,
        num_images_per_prompt: int | None = 1, eta: float = 0.0, generator: Generator = None,
        latents: Tensor | None = None, prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None, ip_adapter_image: Picture | None = None,
        ip_adapter_image_embeds: Sequence[Tensor] | None = None, output_type: str | None = "pil",
        return_dict: bool = True, cross_attention_kwargs: Mapping[str, Any] | None = None,
        controlnet_conditioning_scale: float | Sequence[float] = 1.0, guess_mode: bool = False,
        control_guidance_start: float | Sequence[float] = 0.0, control_guidance_end: float | Sequence[float] = 1.0,
        clip_skip: int | None = None, callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",), *, prompt_syntax: str = "plain",
        progress: bool = True, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Generate images; see `pipelines.request.Request`."""
        return self._generate(locals())


class StableDiffusionControlNetImg2ImgPipeline(StableDiffusionImg2ImgPipeline):
    """Image to image with ControlNets for SD 1.x and 2.x."""

    _callback_tensor_inputs: tuple[str, ...] = (*GUIDED_TENSORS, "control_image")

    def __call__(  # type: ignore[override]
        self, prompt: Prompt | None = None, image: Picture | None = None, control_image: Picture | None = None,
        height: int | None = None, width: int | None = None, strength: float = 0.8, num_inference_steps: int = STEPS,
        guidance_scale: float = GUIDANCE, negative_prompt: Prompt | None = None, num_images_per_prompt: int | None = 1,
        eta: float = 0.0, generator: Generator = None, latents: Tensor | None = None,
        prompt_embeds: Tensor | None = None, negative_prompt_embeds: Tensor | None = None,
        ip_adapter_image: Picture | None = None, ip_adapter_image_embeds: Sequence[Tensor] | None = None,
        output_type: str | None = "pil", return_dict: bool = True,
        cross_attention_kwargs: Mapping[str, Any] | None = None,
        controlnet_conditioning_scale: float | Sequence[float] = 0.8, guess_mode: bool = False,
        control_guidance_start: float | Sequence[float] = 0.0, control_guidance_end: float | Sequence[float] = 1.0,
        clip_skip: int | None = None, callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",), *, prompt_syntax: str = "plain",
        progress: bool = True, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Generate images; see `pipelines.request.Request`."""
        return self._generate(locals())


class StableDiffusionControlNetInpaintPipeline(StableDiffusionInpaintPipeline):
    """Inpainting with ControlNets for SD 1.x and 2.x."""

    SIZE_OF_IMAGE = True
    _callback_tensor_inputs: tuple[str, ...] = (*GUIDED_TENSORS, "control_image", "mask", "masked_image_latents")

    def __call__(  # type: ignore[override]
        self, prompt: Prompt | None = None, image: Picture | None = None, mask_image: Picture | None = None,
        control_image: Picture | None = None, height: int | None = None, width: int | None = None,
        padding_mask_crop: int | None = None, strength: float = 1.0, num_inference_steps: int = STEPS,
        guidance_scale: float = GUIDANCE, negative_prompt: Prompt | None = None, num_images_per_prompt: int | None = 1,
        eta: float = 0.0, generator: Generator = None, latents: Tensor | None = None,
        prompt_embeds: Tensor | None = None, negative_prompt_embeds: Tensor | None = None,
        ip_adapter_image: Picture | None = None, ip_adapter_image_embeds: Sequence[Tensor] | None = None,
        output_type: str | None = "pil", return_dict: bool = True,
        cross_attention_kwargs: Mapping[str, Any] | None = None,
        controlnet_conditioning_scale: float | Sequence[float] = 0.5, guess_mode: bool = False,
        control_guidance_start: float | Sequence[float] = 0.0, control_guidance_end: float | Sequence[float] = 1.0,
        clip_skip: int | None = None, callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",), *, prompt_syntax: str = "plain",
        progress: bool = True, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Generate images; see `pipelines.request.Request`."""
        return self._generate(locals())


class StableDiffusionXLControlNetPipeline(StableDiffusionXLPipeline):
    """Text to image with ControlNets for SDXL. `image`: the control image."""

    _callback_tensor_inputs: tuple[str, ...] = (*XL_TENSORS, "image")

    def __call__(  # type: ignore[override]
        self, prompt: Prompt | None = None, prompt_2: Prompt | None = None, image: Picture | None = None,
        height: int | None = None, width: int | None = None, num_inference_steps: int = STEPS,
        timesteps: Sequence[int] | None = None, sigmas: Sequence[float] | None = None,
        denoising_end: float | None = None, guidance_scale: float = XL_GUIDANCE, negative_prompt: Prompt | None = None,
        negative_prompt_2: Prompt | None = None, num_images_per_prompt: int | None = 1, eta: float = 0.0,
        generator: Generator = None, latents: Tensor | None = None, prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None, pooled_prompt_embeds: Tensor | None = None,
        negative_pooled_prompt_embeds: Tensor | None = None, ip_adapter_image: Picture | None = None,
        ip_adapter_image_embeds: Sequence[Tensor] | None = None, output_type: str | None = "pil",
        return_dict: bool = True, cross_attention_kwargs: Mapping[str, Any] | None = None,
        controlnet_conditioning_scale: float | Sequence[float] = 1.0, guess_mode: bool = False,
        control_guidance_start: float | Sequence[float] = 0.0, control_guidance_end: float | Sequence[float] = 1.0,
        original_size: Size | None = None, crops_coords_top_left: Size = (0, 0), target_size: Size | None = None,
        negative_original_size: Size | None = None, negative_crops_coords_top_left: Size = (0, 0),
        negative_target_size: Size | None = None, clip_skip: int | None = None,
        callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",), *, prompt_syntax: str = "plain",
        progress: bool = True, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Generate images; see `pipelines.request.Request`."""
        return self._generate(locals())


class StableDiffusionXLControlNetImg2ImgPipeline(StableDiffusionXLImg2ImgPipeline):
    """Image to image with ControlNets for SDXL."""

    _callback_tensor_inputs: tuple[str, ...] = (*XL_IMAGE_TENSORS, "control_image")

    def __call__(  # type: ignore[override]
        self, prompt: Prompt | None = None, prompt_2: Prompt | None = None, image: Picture | None = None,
        control_image: Picture | None = None, height: int | None = None, width: int | None = None,
        strength: float = 0.8, num_inference_steps: int = STEPS, guidance_scale: float = XL_GUIDANCE,
        negative_prompt: Prompt | None = None, negative_prompt_2: Prompt | None = None,
        num_images_per_prompt: int | None = 1, eta: float = 0.0, generator: Generator = None,
        latents: Tensor | None = None, prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None, pooled_prompt_embeds: Tensor | None = None,
        negative_pooled_prompt_embeds: Tensor | None = None, ip_adapter_image: Picture | None = None,
        ip_adapter_image_embeds: Sequence[Tensor] | None = None, output_type: str | None = "pil",
        return_dict: bool = True, cross_attention_kwargs: Mapping[str, Any] | None = None,
        controlnet_conditioning_scale: float | Sequence[float] = 0.8, guess_mode: bool = False,
        control_guidance_start: float | Sequence[float] = 0.0, control_guidance_end: float | Sequence[float] = 1.0,
        original_size: Size | None = None, crops_coords_top_left: Size = (0, 0), target_size: Size | None = None,
        negative_original_size: Size | None = None, negative_crops_coords_top_left: Size = (0, 0),
        negative_target_size: Size | None = None, aesthetic_score: float = 6.0, negative_aesthetic_score: float = 2.5,
        clip_skip: int | None = None, callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",), *, prompt_syntax: str = "plain",
        progress: bool = True, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Generate images; see `pipelines.request.Request`."""
        return self._generate(locals())


class StableDiffusionXLControlNetInpaintPipeline(StableDiffusionXLInpaintPipeline):
    """Inpainting with ControlNets for SDXL."""

    SIZE_OF_IMAGE = True
    _callback_tensor_inputs: tuple[str, ...] = (*XL_IMAGE_TENSORS, "mask", "masked_image_latents", "control_image")

    def __call__(  # type: ignore[override]
        self, prompt: Prompt | None = None, prompt_2: Prompt | None = None, image: Picture | None = None,
        mask_image: Picture | None = None, control_image: Picture | None = None, height: int | None = None,
        width: int | None = None, padding_mask_crop: int | None = None, strength: float = 0.9999,
        num_inference_steps: int = STEPS, denoising_start: float | None = None, denoising_end: float | None = None,
        guidance_scale: float = XL_GUIDANCE, negative_prompt: Prompt | None = None,
        negative_prompt_2: Prompt | None = None, num_images_per_prompt: int | None = 1, eta: float = 0.0,
        generator: Generator = None, latents: Tensor | None = None, prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None, ip_adapter_image: Picture | None = None,
        ip_adapter_image_embeds: Sequence[Tensor] | None = None, pooled_prompt_embeds: Tensor | None = None,
        negative_pooled_prompt_embeds: Tensor | None = None, output_type: str | None = "pil", return_dict: bool = True,
        cross_attention_kwargs: Mapping[str, Any] | None = None,
        controlnet_conditioning_scale: float | Sequence[float] = 1.0, guess_mode: bool = False,
        control_guidance_start: float | Sequence[float] = 0.0, control_guidance_end: float | Sequence[float] = 1.0,
        guidance_rescale: float = 0.0, original_size: Size | None = None, crops_coords_top_left: Size = (0, 0),
        target_size: Size | None = None, aesthetic_score: float = 6.0, negative_aesthetic_score: float = 2.5,
        clip_skip: int | None = None, callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",), *, prompt_syntax: str = "plain",
        progress: bool = True, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Generate images; see `pipelines.request.Request`."""
        return self._generate(locals())


class LatentConsistencyModelPipeline(StableDiffusionPipeline):
    """Text to image with latent consistency models."""

    DEFAULT_SIZE_UNLESS_BOTH = False
    CAN_INTERRUPT = False
    CHANGES_LAST_LATENTS = False
    _callback_tensor_inputs: tuple[str, ...] = ("latents", "prompt_embeds", "w_embedding")

    def __call__(  # type: ignore[override]
        self, prompt: Prompt | None = None, height: int | None = None, width: int | None = None,
        num_inference_steps: int = 4, original_inference_steps: int | None = None,
        timesteps: Sequence[int] | None = None, guidance_scale: float = 8.5, num_images_per_prompt: int | None = 1,
        generator: Generator = None, latents: Tensor | None = None, prompt_embeds: Tensor | None = None,
        ip_adapter_image: Picture | None = None, ip_adapter_image_embeds: Sequence[Tensor] | None = None,
        output_type: str | None = "pil", return_dict: bool = True,
        cross_attention_kwargs: Mapping[str, Any] | None = None, clip_skip: int | None = None,
        callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",), *, prompt_syntax: str = "plain",
        progress: bool = True, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Generate images; see `pipelines.request.Request`."""
        return self._generate(locals())


class LatentConsistencyModelImg2ImgPipeline(StableDiffusionImg2ImgPipeline):
    """Image to image with latent consistency models."""

    CAN_INTERRUPT = False
    CHANGES_LAST_LATENTS = False
    STRENGTH_IN_SCHEDULER = True
    _callback_tensor_inputs: tuple[str, ...] = ("latents", "prompt_embeds", "w_embedding")

    def __call__(  # type: ignore[override]
        self, prompt: Prompt | None = None, image: Picture | None = None, num_inference_steps: int = 4,
        strength: float = 0.8, original_inference_steps: int | None = None, timesteps: Sequence[int] | None = None,
        guidance_scale: float = 8.5, num_images_per_prompt: int | None = 1, generator: Generator = None,
        latents: Tensor | None = None, prompt_embeds: Tensor | None = None, ip_adapter_image: Picture | None = None,
        ip_adapter_image_embeds: Sequence[Tensor] | None = None, output_type: str | None = "pil",
        return_dict: bool = True, cross_attention_kwargs: Mapping[str, Any] | None = None,
        clip_skip: int | None = None, callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",), *, prompt_syntax: str = "plain",
        progress: bool = True, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Generate images; see `pipelines.request.Request`."""
        return self._generate(locals())


class AutoPipelineMixin:
    """Loading of the class that the folder's model_index.json names, or of its form with PAG."""

    TASK: str

    @classmethod
    def from_pretrained(
        cls, model: Path | str, provider: str = AUTO, scheduler: Any = None, *, enable_pag: bool = False, **options: Any
    ) -> Any:  # fmt: skip
        """Load a model, see `StableDiffusionPipeline.from_pretrained`. `enable_pag`: with perturbed attention guidance,
        in the layers `pag_applied_layers`."""
        if enable_pag:
            guided: Any = getattr(sd_ort, f"StableDiffusionPAG{cls.TASK}Pipeline")
            return guided.from_pretrained(model, provider, scheduler, **options)
        dtype, config = options.get("torch_dtype", options.get("dtype")), options.pop("config", None)
        folder, choice = open_model(model, provider, dtype=dtype, config=config, on_progress=print_line)
        if choice.reason:
            announce(choice.line)
        if (name := str(read_index(folder).get("_class_name"))) in sd_ort.TRANSFORMER_PIPELINES:
            family: Any = getattr(sd_ort, sd_ort.transformer_pipeline(name, cls.TASK))
            return family.from_pretrained(folder, choice.provider, scheduler=scheduler, **options)
        parent: Any = super()
        return parent.from_pretrained(folder, choice.provider, scheduler, **options)

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
