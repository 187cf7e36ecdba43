"""Image to image and inpainting with diffusion transformers: Stable Diffusion 3, FLUX.1 and Qwen-Image.

Random numbers are drawn in diffusers' order: the VAE encoder's, then the noise. So the same seed gives the same image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from sd_ort.checkpoints.conditioning import latent_scale
from sd_ort.checkpoints.flow_match import FlowMatchSchedule, InpaintBlend
from sd_ort.core.errors import InputError
from sd_ort.pipelines.images import as_array, is_latents, nearest, preprocess, readable
from sd_ort.pipelines.noise import draw_noise, sources
from sd_ort.pipelines.request import Generator, Picture, Prompt, StepCallback
from sd_ort.pipelines.transformer_pipelines import (
    FLUX_STEPS,
    TEXT_TOKENS,
    FluxPipeline,
    StableDiffusion3Pipeline,
    TransformerPipeline,
    arguments,
)
from sd_ort.pipelines.transformer_qwen_image import QwenImagePipeline

if TYPE_CHECKING:
    from torch import Tensor


def _repeated(x: np.ndarray, count: int, what: str) -> np.ndarray:
    """Return an array with a row for each of `count` images."""
    if count % len(x):
        raise InputError(f"{len(x)} {what} were given for {count} images: give one, or one an image.")
    return np.concatenate([x] * (count // len(x)))


class _ImageStart(TransformerPipeline):
    """Starts from an image: noise replaces it for the first `strength` of the steps."""

    REQUIRED_COMPONENTS = (*TransformerPipeline.REQUIRED_COMPONENTS, "vae_encoder")
    INPAINTS = False
    STARTS_FROM_NOISE = False  # at strength 1, and not from what the first sigma leaves of the image

    def _start(
        self, shape: tuple[int, ...], call: SimpleNamespace, schedule: FlowMatchSchedule, size: tuple[int, int]
    ) -> tuple[np.ndarray, InpaintBlend | None]:
        generator, latents, strength = call.generator, call.latents, call.strength
        picture, masks = readable(call.image), None
        if latents is not None and (latents := as_array(latents)).shape != shape:
            raise InputError(f"latents of shape {latents.shape} were given where {shape} are needed.")
        if self.INPAINTS:
            masks = preprocess(readable(call.mask_image, "mask"), *size, mask=True)
        elif latents is not None:
            return latents, None
        if isinstance(generator, Sequence) and len(generator) != shape[0]:
            raise InputError(f"{len(generator)} generators were given for {shape[0]} images.")
        source = sources(generator)
        pixels = preprocess(picture, *size, latent_channels=self.vae.latent_channels)
        encoded = pixels if is_latents(picture, self.vae.latent_channels) else self.vae.to_latents(pixels, source)
        encoded = _repeated(encoded, shape[0], "images")
        noise = draw_noise(shape, source) if latents is None else latents
        starts_from_noise = latents is not None or (self.STARTS_FROM_NOISE and strength == 1)
        sample = noise if starts_from_noise else schedule.add_noise(0, encoded, noise)
        if masks is None:
            return sample, None
        self.vae.skip_noise(len(pixels), shape, source)  # diffusers encodes the masked image, which nothing reads
        mask = _repeated(nearest(masks, *shape[2:]), shape[0], "masks")
        return sample, InpaintBlend(encoded, noise, np.broadcast_to(mask, shape))


class StableDiffusion3Img2ImgPipeline(_ImageStart, StableDiffusion3Pipeline):
    """Image to image with Stable Diffusion 3 and 3.5 pipeline folders."""

    _callback_tensor_inputs = ("latents", "prompt_embeds", "negative_prompt_embeds", "negative_pooled_prompt_embeds")

    def __call__(  # type: ignore[override]
        self, prompt: Prompt | None = None, prompt_2: Prompt | None = None, prompt_3: Prompt | None = None,
        height: int | None = None, width: int | None = None, image: Picture | None = None, strength: float = 0.6,
        num_inference_steps: int = 50, sigmas: Sequence[float] | None = None, guidance_scale: float = 7.0,
        negative_prompt: Prompt | None = None, negative_prompt_2: Prompt | None = None,
        negative_prompt_3: Prompt | None = None, num_images_per_prompt: int | None = 1, generator: Generator = None,
        latents: Tensor | None = None, prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None, pooled_prompt_embeds: Tensor | None = None,
        negative_pooled_prompt_embeds: Tensor | None = None, output_type: str | None = "pil",
        ip_adapter_image: Picture | None = None, ip_adapter_image_embeds: Sequence[Tensor] | None = None,
        return_dict: bool = True, joint_attention_kwargs: Mapping[str, Any] | None = None,
        clip_skip: int | None = None, callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",), max_sequence_length: int = 256,
        mu: float | None = None, progress: bool = False, **unsupported: Any,
    ) -> Any:  # fmt: skip
        """Generate from `image`, which is resized to height and width. The arguments are those of diffusers."""
        return self._generate(arguments(locals()))


class StableDiffusion3InpaintPipeline(_ImageStart, StableDiffusion3Pipeline):
    """Inpainting with Stable Diffusion 3 and 3.5 pipeline folders: generates where a mask is white."""

    INPAINTS = STARTS_FROM_NOISE = True
    _callback_tensor_inputs = ("latents", "prompt_embeds", "negative_prompt_embeds", "negative_pooled_prompt_embeds")

    def __call__(  # type: ignore[override]
        self, prompt: Prompt | None = None, prompt_2: Prompt | None = None, prompt_3: Prompt | None = None,
        image: Picture | None = None, mask_image: Picture | None = None, masked_image_latents: Tensor | None = None,
        height: int | None = None, width: int | None = None, padding_mask_crop: int | None = None,
        strength: float = 0.6, num_inference_steps: int = 50, sigmas: Sequence[float] | None = None,
        guidance_scale: float = 7.0, negative_prompt: Prompt | None = None, negative_prompt_2: Prompt | None = None,
        negative_prompt_3: Prompt | None = None, num_images_per_prompt: int | None = 1, generator: Generator = None,
        latents: Tensor | None = None, prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None, pooled_prompt_embeds: Tensor | None = None,
        negative_pooled_prompt_embeds: Tensor | None = None, ip_adapter_image: Picture | None = None,
        ip_adapter_image_embeds: Sequence[Tensor] | None = None, output_type: str | None = "pil",
        return_dict: bool = True, joint_attention_kwargs: Mapping[str, Any] | None = None,
        clip_skip: int | None = None, callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",), max_sequence_length: int = 256,
        mu: float | None = None, progress: bool = False, **unsupported: Any,
    ) -> Any:  # fmt: skip
        """Generate where `mask_image` is white (1). The arguments are those of diffusers."""
        return self._generate(arguments(locals()))

    def _output(self, latents: np.ndarray, output_type: str, return_dict: bool) -> Any:
        mean, factor = latent_scale(self.vae.config)
        return super()._output(latents - mean / factor, output_type, return_dict)  # diffusers adds no shift_factor here


class FluxImg2ImgPipeline(_ImageStart, FluxPipeline):
    """Image to image with FLUX.1 pipeline folders."""

    def __call__(  # type: ignore[override]
        self, prompt: Prompt | None = None, prompt_2: Prompt | None = None, negative_prompt: Prompt | None = None,
        negative_prompt_2: Prompt | None = None, true_cfg_scale: float = 1.0, image: Picture | None = None,
        height: int | None = None, width: int | None = None, strength: float = 0.6,
        num_inference_steps: int = FLUX_STEPS, sigmas: Sequence[float] | None = None, guidance_scale: float = 7.0,
        num_images_per_prompt: int | None = 1,
        generator: Generator = None, latents: Tensor | None = None, prompt_embeds: Tensor | None = None,
        pooled_prompt_embeds: Tensor | None = None, ip_adapter_image: Picture | None = None,
        ip_adapter_image_embeds: Sequence[Tensor] | None = None, negative_ip_adapter_image: Picture | None = None,
        negative_ip_adapter_image_embeds: Sequence[Tensor] | None = None,
        negative_prompt_embeds: Tensor | None = None, negative_pooled_prompt_embeds: Tensor | None = None,
        output_type: str | None = "pil", return_dict: bool = True,
        joint_attention_kwargs: Mapping[str, Any] | None = None, callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",), max_sequence_length: int = TEXT_TOKENS,
        progress: bool = False, **unsupported: Any,
    ) -> Any:  # fmt: skip
        """Generate from `image`, which is resized to height and width. The arguments are those of diffusers."""
        return self._generate(arguments(locals()))


class FluxInpaintPipeline(_ImageStart, FluxPipeline):
    """Inpainting with FLUX.1 pipeline folders: generates where a mask is white."""

    INPAINTS = TAKES_UNPACKED_LATENTS = True

    def __call__(  # type: ignore[override]
        self, prompt: Prompt | None = None, prompt_2: Prompt | None = None, negative_prompt: Prompt | None = None,
        negative_prompt_2: Prompt | None = None, true_cfg_scale: float = 1.0, image: Picture | None = None,
        mask_image: Picture | None = None, masked_image_latents: Tensor | None = None, height: int | None = None,
        width: int | None = None, padding_mask_crop: int | None = None, strength: float = 0.6,
        num_inference_steps: int = FLUX_STEPS, sigmas: Sequence[float] | None = None, guidance_scale: float = 7.0,
        num_images_per_prompt: int | None = 1, generator: Generator = None, latents: Tensor | None = None,
        prompt_embeds: Tensor | None = None, pooled_prompt_embeds: Tensor | None = None,
        ip_adapter_image: Picture | None = None, ip_adapter_image_embeds: Sequence[Tensor] | None = None,
        negative_ip_adapter_image: Picture | None = None,
        negative_ip_adapter_image_embeds: Sequence[Tensor] | None = None,
        negative_prompt_embeds: Tensor | None = None, negative_pooled_prompt_embeds: Tensor | None = None,
        output_type: str | None = "pil", return_dict: bool = True,
        joint_attention_kwargs: Mapping[str, Any] | None = None, callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",), max_sequence_length: int = TEXT_TOKENS,
        progress: bool = False, **unsupported: Any,
    ) -> Any:  # fmt: skip
        """Generate where `mask_image` is white (1). The arguments are those of diffusers."""
        return self._generate(arguments(locals()))


class QwenImageImg2ImgPipeline(_ImageStart, QwenImagePipeline):
    """Image to image with Qwen-Image pipeline folders."""

    def __call__(  # type: ignore[override]
        self, prompt: Prompt | None = None, negative_prompt: Prompt | None = None, true_cfg_scale: float = 4.0,
        image: Picture | None = None, height: int | None = None, width: int | None = None, strength: float = 0.6,
        num_inference_steps: int = 50, sigmas: Sequence[float] | None = None, guidance_scale: float | None = None,
        num_images_per_prompt: int = 1, generator: Generator = None, latents: Tensor | None = None,
        prompt_embeds: Tensor | None = None, prompt_embeds_mask: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None, negative_prompt_embeds_mask: Tensor | None = None,
        output_type: str | None = "pil", return_dict: bool = True, attention_kwargs: Mapping[str, Any] | None = None,
        callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",), max_sequence_length: int = 512,
        progress: bool = False, **unsupported: Any,
    ) -> Any:  # fmt: skip
        """Generate from `image`, which is resized to height and width. The arguments are those of diffusers."""
        return self._generate(arguments(locals()))


class QwenImageInpaintPipeline(_ImageStart, QwenImagePipeline):
    """Inpainting with Qwen-Image pipeline folders: generates where a mask is white."""

    INPAINTS = True

    def __call__(  # type: ignore[override]
        self, prompt: Prompt | None = None, negative_prompt: Prompt | None = None, true_cfg_scale: float = 4.0,
        image: Picture | None = None, mask_image: Picture | None = None, masked_image_latents: Tensor | None = None,
        height: int | None = None, width: int | None = None, padding_mask_crop: int | None = None,
        strength: float = 0.6, num_inference_steps: int = 50, sigmas: Sequence[float] | None = None,
        guidance_scale: float | None = None, num_images_per_prompt: int = 1, generator: Generator = None,
        latents: Tensor | None = None, prompt_embeds: Tensor | None = None, prompt_embeds_mask: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None, negative_prompt_embeds_mask: Tensor | None = None,
        output_type: str | None = "pil", return_dict: bool = True, attention_kwargs: Mapping[str, Any] | None = None,
        callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",), max_sequence_length: int = 512,
        progress: bool = False, **unsupported: Any,
    ) -> Any:  # fmt: skip
        """Generate where `mask_image` is white (1). The arguments are those of diffusers, whose `latents` fail too."""
        return self._generate(arguments(locals()))

    def _check(self, call: SimpleNamespace, **scales: float | None) -> tuple[int, int, int]:
        if call.latents is not None:  # diffusers 0.42.1 raises too: it needs the noise and the image beside them
            raise InputError("QwenImageInpaintPipeline takes no latents: give image, and a generator for its noise.")
        return super()._check(call, **scales)
