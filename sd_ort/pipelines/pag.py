"""diffusers' pipelines with perturbed attention guidance (PAG), with their arguments and defaults.

The UNet reads further rows, in which the self-attention of `pag_applied_layers` returns its values unattended, and the
prediction moves away from theirs (Ahn et al., 2024, arXiv 2403.17377). Its graph is edited when it is first needed
(`graphs.perturbed_attention`), so that every folder whose weights have recipes can be used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sd_ort.core.errors import InputError
from sd_ort.pipelines.arguments import GUIDANCE, GUIDED_TENSORS, STEPS, XL_GUIDANCE, XL_IMAGE_TENSORS, XL_TENSORS
from sd_ort.pipelines.families import (
    StableDiffusionControlNetInpaintPipeline,
    StableDiffusionControlNetPipeline,
    StableDiffusionXLControlNetImg2ImgPipeline,
    StableDiffusionXLControlNetPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLInpaintPipeline,
    StableDiffusionXLPipeline,
)
from sd_ort.pipelines.image_to_image import StableDiffusionImg2ImgPipeline, StableDiffusionInpaintPipeline
from sd_ort.pipelines.request import Generator, Picture, Prompt, Size, StepCallback
from sd_ort.pipelines.state import PipelineState
from sd_ort.pipelines.text_to_image import StableDiffusionPipeline
from sd_ort.runtime.provider_choice import AUTO

if TYPE_CHECKING:
    from torch import Tensor


class PerturbedAttentionMixin(PipelineState):
    """Layers and scales of perturbed attention guidance."""

    PAG = "PAG"
    _pag_scale = 0.0
    _pag_adaptive_scale = 0.0
    pag_applied_layers: Sequence[str] = ("mid",)

    @classmethod
    def from_pretrained(
        cls, model: Path | str, provider: str = AUTO, scheduler: Any = None, *,
        pag_applied_layers: str | Sequence[str] = "mid", **options: Any,
    ) -> Any:  # fmt: skip
        """Load a model, see `StableDiffusionPipeline.from_pretrained`, with layers as in `set_pag_applied_layers`."""
        parent: Any = super()
        pipeline = parent.from_pretrained(model, provider, scheduler, **options)
        pipeline.set_pag_applied_layers(pag_applied_layers)
        return pipeline

    @classmethod
    def from_pipe(cls, pipeline: Any, *, pag_applied_layers: str | Sequence[str] = "mid", **options: Any) -> Any:
        """Return a pipeline over another's folder and sessions, with layers as in `set_pag_applied_layers`."""
        parent: Any = super()
        created = parent.from_pipe(pipeline, **options)
        created.set_pag_applied_layers(pag_applied_layers)
        return created

    def set_pag_applied_layers(self, pag_applied_layers: str | Sequence[str]) -> None:
        """Perturb the self-attention layers whose names match regular expressions: "mid", "up_blocks.0.attentions.0".

        Raises InputError for anything else than a string or a list of strings.
        """
        layers = [pag_applied_layers] if isinstance(pag_applied_layers, str) else pag_applied_layers
        if not isinstance(layers, (list, tuple)) or not all(isinstance(layer, str) for layer in layers):
            raise InputError(f"pag_applied_layers must be a string or a list of strings, got {pag_applied_layers!r}.")
        self.pag_applied_layers = list(layers)

    @property
    def pag_scale(self) -> float:
        """Scale of the last call."""
        return self._pag_scale

    @property
    def pag_adaptive_scale(self) -> float:
        """Decrease of the scale per timestep, of the last call."""
        return self._pag_adaptive_scale

    @property
    def do_perturbed_attention_guidance(self) -> bool:
        return self._pag_scale > 0 and len(self.pag_applied_layers) > 0

    @property
    def do_pag_adaptive_scaling(self) -> bool:
        return self._pag_adaptive_scale > 0 and self.do_perturbed_attention_guidance


class StableDiffusionPAGPipeline(PerturbedAttentionMixin, StableDiffusionPipeline):
    """Text to image with perturbed attention guidance, SD 1.x and 2.x."""

    DEFAULT_SIZE_UNLESS_BOTH = False

    def __call__(  # type: ignore[override]
        self, prompt: Prompt | None = None, height: int | None = None, width: int | None = None,
        num_inference_steps: int = STEPS, timesteps: Sequence[int] | None = None, sigmas: Sequence[float] | None = None,
        guidance_scale: float = GUIDANCE, negative_prompt: Prompt | None = None, num_images_per_prompt: int | None = 1,
        eta: float = 0.0, generator: Generator = None, latents: Tensor | None = None,
        prompt_embeds: Tensor | None = None, negative_prompt_embeds: Tensor | None = None,
        ip_adapter_image: Picture | None = None, ip_adapter_image_embeds: Sequence[Tensor] | None = None,
        output_type: str | None = "pil", return_dict: bool = True,
        cross_attention_kwargs: Mapping[str, Any] | None = None, guidance_rescale: float = 0.0,
        clip_skip: int | None = None, callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",), pag_scale: float = 3.0,
        pag_adaptive_scale: float = 0.0, *, prompt_syntax: str = "plain", progress: bool = True,
    ) -> Any:  # fmt: skip
        """Generate images; see `pipelines.request.Request`."""
        return self._generate(locals())


class StableDiffusionPAGImg2ImgPipeline(PerturbedAttentionMixin, StableDiffusionImg2ImgPipeline):
    """Image to image with perturbed attention guidance, SD 1.x and 2.x."""

    def __call__(  # type: ignore[override]
        self, prompt: Prompt | None = None, image: Picture | None = None, strength: float = 0.8,
        num_inference_steps: int = STEPS, timesteps: Sequence[int] | None = None, sigmas: Sequence[float] | None = None,
        guidance_scale: float = GUIDANCE, negative_prompt: Prompt | None = None, num_images_per_prompt: int | None = 1,
        eta: float = 0.0, generator: Generator = None, prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None, ip_adapter_image: Picture | None = None,
        ip_adapter_image_embeds: Sequence[Tensor] | None = None, output_type: str | None = "pil",
        return_dict: bool = True, cross_attention_kwargs: Mapping[str, Any] | None = None, clip_skip: int | None = None,
        callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",), pag_scale: float = 3.0,
        pag_adaptive_scale: float = 0.0, *, prompt_syntax: str = "plain", progress: bool = True,
    ) -> Any:  # fmt: skip
        """Generate images; see `pipelines.request.Request`."""
        return self._generate(locals())


class StableDiffusionPAGInpaintPipeline(PerturbedAttentionMixin, StableDiffusionInpaintPipeline):
    """Inpainting with perturbed attention guidance, SD 1.x and 2.x."""

    _callback_tensor_inputs: tuple[str, ...] = GUIDED_TENSORS

    def __call__(  # type: ignore[override]
        self, prompt: Prompt | None = None, image: Picture | None = None, mask_image: Picture | None = None,
        masked_image_latents: Tensor | None = None, height: int | None = None, width: int | None = None,
        padding_mask_crop: int | None = None, strength: float = 0.9999, num_inference_steps: int = STEPS,
        timesteps: Sequence[int] | None = None, sigmas: Sequence[float] | None = None, guidance_scale: float = GUIDANCE,
        negative_prompt: Prompt | None = None, num_images_per_prompt: int | None = 1, eta: float = 0.0,
        generator: Generator = None, latents: Tensor | None = None, prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None, ip_adapter_image: Picture | None = None,
        ip_adapter_image_embeds: Sequence[Tensor] | None = None, output_type: str | None = "pil",
        return_dict: bool = True, cross_attention_kwargs: Mapping[str, Any] | None = None,
        guidance_rescale: float = 0.0, clip_skip: int | None = None, callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",), pag_scale: float = 3.0,
        pag_adaptive_scale: float = 0.0, *, prompt_syntax: str = "plain", progress: bool = True,
    ) -> Any:  # fmt: skip
        """Generate images; see `pipelines.request.Request`."""
        return self._generate(locals())


class StableDiffusionXLPAGPipeline(PerturbedAttentionMixin, StableDiffusionXLPipeline):
    """Text to image with perturbed attention guidance, SDXL."""

    _callback_tensor_inputs: tuple[str, ...] = XL_TENSORS

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
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",), pag_scale: float = 3.0,
        pag_adaptive_scale: float = 0.0, *, prompt_syntax: str = "plain", progress: bool = True,
    ) -> Any:  # fmt: skip
        """Generate images; see `pipelines.request.Request`."""
        return self._generate(locals())


class StableDiffusionXLPAGImg2ImgPipeline(PerturbedAttentionMixin, StableDiffusionXLImg2ImgPipeline):
    """Image to image with perturbed attention guidance, SDXL."""

    _callback_tensor_inputs: tuple[str, ...] = XL_IMAGE_TENSORS

    def __call__(  # type: ignore[override]
        self, prompt: Prompt | None = None, prompt_2: Prompt | None = None, image: Picture | None = None,
        strength: float = 0.3, num_inference_steps: int = STEPS, timesteps: Sequence[int] | None = None,
        sigmas: Sequence[float] | None = None, denoising_start: float | None = None, denoising_end: float | None = None,
        guidance_scale: float = XL_GUIDANCE, negative_prompt: Prompt | None = None,
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
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",), pag_scale: float = 3.0,
        pag_adaptive_scale: float = 0.0, *, prompt_syntax: str = "plain", progress: bool = True,
    ) -> Any:  # fmt: skip
        """Generate images; see `pipelines.request.Request`."""
        return self._generate(locals())


class StableDiffusionXLPAGInpaintPipeline(PerturbedAttentionMixin, StableDiffusionXLInpaintPipeline):
    """Inpainting with perturbed attention guidance, SDXL."""

    _callback_tensor_inputs: tuple[str, ...] = (*XL_IMAGE_TENSORS, "mask", "masked_image_latents")

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
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",), pag_scale: float = 3.0,
        pag_adaptive_scale: float = 0.0, *, prompt_syntax: str = "plain", progress: bool = True,
    ) -> Any:  # fmt: skip
        """Generate images; see `pipelines.request.Request`."""
        return self._generate(locals())


class StableDiffusionControlNetPAGPipeline(PerturbedAttentionMixin, StableDiffusionControlNetPipeline):
    """Text to image with perturbed attention guidance, ControlNets and SD 1.x and 2.x."""

    CAN_INTERRUPT = False
    CONTROLNET_READS_CHANGES = False
    _callback_tensor_inputs: tuple[str, ...] = GUIDED_TENSORS

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
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",), pag_scale: float = 3.0,
        pag_adaptive_scale: float = 0.0, *, prompt_syntax: str = "plain", progress: bool = True,
    ) -> Any:  # fmt: skip
        """Generate images; see `pipelines.request.Request`."""
        return self._generate(locals())


class StableDiffusionControlNetPAGInpaintPipeline(PerturbedAttentionMixin, StableDiffusionControlNetInpaintPipeline):
    """Inpainting with perturbed attention guidance, ControlNets and SD 1.x and 2.x."""

    CAN_INTERRUPT = False
    CONTROLNET_READS_CHANGES = False
    _callback_tensor_inputs: tuple[str, ...] = GUIDED_TENSORS

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
        controlnet_conditioning_scale: float | Sequence[float] = 0.5,
        control_guidance_start: float | Sequence[float] = 0.0, control_guidance_end: float | Sequence[float] = 1.0,
        clip_skip: int | None = None, callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",), pag_scale: float = 3.0,
        pag_adaptive_scale: float = 0.0, *, prompt_syntax: str = "plain", progress: bool = True,
    ) -> Any:  # fmt: skip
        """Generate images; see `pipelines.request.Request`."""
        return self._generate(locals())


class StableDiffusionXLControlNetPAGPipeline(PerturbedAttentionMixin, StableDiffusionXLControlNetPipeline):
    """Text to image with perturbed attention guidance, ControlNets and SDXL."""

    CAN_INTERRUPT = False
    CONTROLNET_READS_CHANGES = False
    _callback_tensor_inputs: tuple[str, ...] = XL_TENSORS

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
        controlnet_conditioning_scale: float | Sequence[float] = 1.0,
        control_guidance_start: float | Sequence[float] = 0.0, control_guidance_end: float | Sequence[float] = 1.0,
        original_size: Size | None = None, crops_coords_top_left: Size = (0, 0), target_size: Size | None = None,
        negative_original_size: Size | None = None, negative_crops_coords_top_left: Size = (0, 0),
        negative_target_size: Size | None = None, clip_skip: int | None = None,
        callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",), pag_scale: float = 3.0,
        pag_adaptive_scale: float = 0.0, *, prompt_syntax: str = "plain", progress: bool = True,
    ) -> Any:  # fmt: skip
        """Generate images; see `pipelines.request.Request`."""
        return self._generate(locals())


class StableDiffusionXLControlNetPAGImg2ImgPipeline(
    PerturbedAttentionMixin, StableDiffusionXLControlNetImg2ImgPipeline
):
    """Image to image with perturbed attention guidance, ControlNets and SDXL."""

    CAN_INTERRUPT = False
    CONTROLNET_READS_CHANGES = False
    _callback_tensor_inputs: tuple[str, ...] = XL_IMAGE_TENSORS

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
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",), pag_scale: float = 3.0,
        pag_adaptive_scale: float = 0.0, *, prompt_syntax: str = "plain", progress: bool = True,
    ) -> Any:  # fmt: skip
        """Generate images; see `pipelines.request.Request`."""
        return self._generate({**locals(), "guess_mode": False})  # which diffusers ignores here
