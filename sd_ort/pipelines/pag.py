"""diffusers' pipelines with perturbed attention guidance (PAG), with their arguments and defaults.

The UNet reads further rows, in which the self-attention of `pag_applied_layers` returns its values unattended, and the
prediction moves away from theirs (Ahn et al., 2024, arXiv 2403.17377). Its graph is edited when it is first needed
(`graphs.perturbed_attention`), so that every folder whose weights have recipes can be used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sd_ort.core.errors import InputError
from sd_ort.pipelines.arguments import GUIDED_TENSORS, XL_GUIDANCE, XL_IMAGE_TENSORS, XL_TENSORS
from sd_ort.pipelines.call_signature import diffusers_call
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
from sd_ort.pipelines.state import PipelineState
from sd_ort.pipelines.text_to_image import StableDiffusionPipeline
from sd_ort.runtime.provider_choice import AUTO


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

    __call__ = diffusers_call(
        "prompt height width {schedule} guidance_scale negative_prompt {noise} {embeds} {adapter} {output} "
        "guidance_rescale {callback} {pag}"
    )


class StableDiffusionPAGImg2ImgPipeline(PerturbedAttentionMixin, StableDiffusionImg2ImgPipeline):
    """Image to image with perturbed attention guidance, SD 1.x and 2.x."""

    __call__ = diffusers_call(
        "prompt image strength {schedule} guidance_scale negative_prompt num_images_per_prompt eta generator {embeds} "
        "{adapter} {output} {callback} {pag}",
        strength=0.8,
    )


class StableDiffusionPAGInpaintPipeline(PerturbedAttentionMixin, StableDiffusionInpaintPipeline):
    """Inpainting with perturbed attention guidance, SD 1.x and 2.x."""

    _callback_tensor_inputs: tuple[str, ...] = GUIDED_TENSORS

    __call__ = diffusers_call(
        "prompt image mask_image masked_image_latents height width padding_mask_crop strength {schedule} "
        "guidance_scale negative_prompt {noise} {embeds} {adapter} {output} guidance_rescale {callback} {pag}",
        strength=0.9999,
    )


class StableDiffusionXLPAGPipeline(PerturbedAttentionMixin, StableDiffusionXLPipeline):
    """Text to image with perturbed attention guidance, SDXL."""

    _callback_tensor_inputs: tuple[str, ...] = XL_TENSORS

    __call__ = diffusers_call(
        "prompt prompt_2 height width {schedule} denoising_end guidance_scale negative_prompt negative_prompt_2 "
        "{noise} {embeds} {pooled} {adapter} {output} guidance_rescale {sizes} {negative_sizes} {callback} {pag}",
        guidance_scale=XL_GUIDANCE,
    )


class StableDiffusionXLPAGImg2ImgPipeline(PerturbedAttentionMixin, StableDiffusionXLImg2ImgPipeline):
    """Image to image with perturbed attention guidance, SDXL."""

    _callback_tensor_inputs: tuple[str, ...] = XL_IMAGE_TENSORS

    __call__ = diffusers_call(
        "prompt prompt_2 image strength {schedule} denoising_start denoising_end guidance_scale negative_prompt "
        "negative_prompt_2 {noise} {embeds} {pooled} {adapter} {output} guidance_rescale {sizes} {negative_sizes} "
        "{aesthetic} {callback} {pag}",
        strength=0.3,
        guidance_scale=XL_GUIDANCE,
    )


class StableDiffusionXLPAGInpaintPipeline(PerturbedAttentionMixin, StableDiffusionXLInpaintPipeline):
    """Inpainting with perturbed attention guidance, SDXL."""

    _callback_tensor_inputs: tuple[str, ...] = (*XL_IMAGE_TENSORS, "mask", "masked_image_latents")

    __call__ = diffusers_call(
        "prompt prompt_2 image mask_image masked_image_latents height width padding_mask_crop strength {schedule} "
        "denoising_start denoising_end guidance_scale negative_prompt negative_prompt_2 {noise} {embeds} {pooled} "
        "{adapter} {output} guidance_rescale {sizes} {negative_sizes} {aesthetic} {callback} {pag}",
        strength=0.9999,
    )


class StableDiffusionControlNetPAGPipeline(PerturbedAttentionMixin, StableDiffusionControlNetPipeline):
    """Text to image with perturbed attention guidance, ControlNets and SD 1.x and 2.x."""

    CAN_INTERRUPT = False
    CONTROLNET_READS_CHANGES = False
    _callback_tensor_inputs: tuple[str, ...] = GUIDED_TENSORS

    __call__ = diffusers_call(
        "prompt image height width {schedule} guidance_scale negative_prompt {noise} {embeds} {adapter} {output} "
        "{control} {callback} {pag}",
        controlnet_conditioning_scale=1.0,
    )


class StableDiffusionControlNetPAGInpaintPipeline(PerturbedAttentionMixin, StableDiffusionControlNetInpaintPipeline):
    """Inpainting with perturbed attention guidance, ControlNets and SD 1.x and 2.x."""

    CAN_INTERRUPT = False
    CONTROLNET_READS_CHANGES = False
    _callback_tensor_inputs: tuple[str, ...] = GUIDED_TENSORS

    __call__ = diffusers_call(
        "prompt image mask_image control_image height width padding_mask_crop strength num_inference_steps "
        "guidance_scale negative_prompt {noise} {embeds} {adapter} {output} controlnet_conditioning_scale "
        "control_guidance_start control_guidance_end {callback} {pag}",
        strength=1.0,
        controlnet_conditioning_scale=0.5,
    )


class StableDiffusionXLControlNetPAGPipeline(PerturbedAttentionMixin, StableDiffusionXLControlNetPipeline):
    """Text to image with perturbed attention guidance, ControlNets and SDXL."""

    CAN_INTERRUPT = False
    CONTROLNET_READS_CHANGES = False
    _callback_tensor_inputs: tuple[str, ...] = XL_TENSORS

    __call__ = diffusers_call(
        "prompt prompt_2 image height width {schedule} denoising_end guidance_scale negative_prompt negative_prompt_2 "
        "{noise} {embeds} {pooled} {adapter} {output} controlnet_conditioning_scale control_guidance_start "
        "control_guidance_end {sizes} {negative_sizes} {callback} {pag}",
        guidance_scale=XL_GUIDANCE,
        controlnet_conditioning_scale=1.0,
    )


class StableDiffusionXLControlNetPAGImg2ImgPipeline(
    PerturbedAttentionMixin, StableDiffusionXLControlNetImg2ImgPipeline
):
    """Image to image with perturbed attention guidance, ControlNets and SDXL."""

    CAN_INTERRUPT = False
    CONTROLNET_READS_CHANGES = False
    _callback_tensor_inputs: tuple[str, ...] = XL_IMAGE_TENSORS

    __call__ = diffusers_call(
        "prompt prompt_2 image control_image height width strength num_inference_steps guidance_scale negative_prompt "
        "negative_prompt_2 {noise} {embeds} {pooled} {adapter} {output} {control} {sizes} {negative_sizes} "
        "{aesthetic} {callback} {pag}",
        strength=0.8,
        guidance_scale=XL_GUIDANCE,
        controlnet_conditioning_scale=0.8,
    )

    def _generate(self, call: Mapping[str, Any]) -> Any:
        return super()._generate({**call, "guess_mode": False})  # which diffusers ignores here
