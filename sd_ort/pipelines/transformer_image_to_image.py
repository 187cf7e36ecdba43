"""Image to image and inpainting with diffusion transformers: Stable Diffusion 3, FLUX.1 and Qwen-Image.

Random numbers are sampled in diffusers' order: the VAE encoder's, then the noise. The same seed gives the same image.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from sd_ort.checkpoints.conditioning import latent_scale
from sd_ort.checkpoints.flow_match import FlowMatchSchedule, InpaintBlend
from sd_ort.core.errors import InputError
from sd_ort.pipelines.call_signature import transformer_call
from sd_ort.pipelines.images import as_image, is_latents, latents_of_shape, nearest, preprocess, repeat_to_batch
from sd_ort.pipelines.noise import draw_noise, noise_generators
from sd_ort.pipelines.transformer_flux import FLUX_STEPS, TEXT_TOKENS, FluxPipeline
from sd_ort.pipelines.transformer_pipelines import TransformerPipeline
from sd_ort.pipelines.transformer_qwen_image import QwenImagePipeline
from sd_ort.pipelines.transformer_sd3 import StableDiffusion3Pipeline


class _ImageStart(TransformerPipeline):
    """Starts from an image: noise replaces it for the first `strength` of the steps."""

    REQUIRED_COMPONENTS = (*TransformerPipeline.REQUIRED_COMPONENTS, "vae_encoder")
    INPAINTS = False
    STARTS_FROM_NOISE = False  # at strength 1, and not from what the first sigma leaves of the image

    def _start(
        self, shape: tuple[int, ...], call: SimpleNamespace, schedule: FlowMatchSchedule, size: tuple[int, int]
    ) -> tuple[np.ndarray, InpaintBlend | None]:
        generator, latents, strength = call.generator, call.latents, call.strength
        image, masks = as_image(call.image), None
        if latents is not None:
            latents = latents_of_shape(latents, shape)
        if self.INPAINTS:
            masks = preprocess(as_image(call.mask_image, "mask"), *size, mask=True)
        elif latents is not None:
            return latents, None
        if isinstance(generator, Sequence) and len(generator) != shape[0]:
            raise InputError(f"{len(generator)} generators were given for {shape[0]} images.")
        source = noise_generators(generator)
        pixels = preprocess(image, *size, latent_channels=self.vae.latent_channels)
        encoded = pixels if is_latents(image, self.vae.latent_channels) else self.vae.to_latents(pixels, source)
        encoded = repeat_to_batch(encoded, shape[0], "images")
        noise = draw_noise(shape, source) if latents is None else latents
        starts_from_noise = latents is not None or (self.STARTS_FROM_NOISE and strength == 1)
        sample = noise if starts_from_noise else schedule.add_noise(0, encoded, noise)
        if masks is None:
            return sample, None
        self.vae.skip_noise(len(pixels), shape, source)  # diffusers encodes the masked image, which nothing reads
        mask = repeat_to_batch(nearest(masks, *shape[2:]), shape[0], "masks")
        return sample, InpaintBlend(encoded, noise, np.broadcast_to(mask, shape))


class StableDiffusion3Img2ImgPipeline(_ImageStart, StableDiffusion3Pipeline):
    """Image to image with Stable Diffusion 3 and 3.5 pipeline folders."""

    _callback_tensor_inputs = ("latents", "prompt_embeds", "negative_prompt_embeds", "negative_pooled_prompt_embeds")

    __call__ = transformer_call(
        "{prompts} height width image strength {steps} guidance_scale {negatives} {draw} {embeds} {pooled} "
        "output_type {adapter} return_dict joint_attention_kwargs {callback} max_sequence_length mu",
        "Generate from `image`, which is resized to height and width. The arguments are those of diffusers.",
        strength=0.6,
        guidance_scale=7.0,
        max_sequence_length=256,
    )


class StableDiffusion3InpaintPipeline(_ImageStart, StableDiffusion3Pipeline):
    """Inpainting with Stable Diffusion 3 and 3.5 pipeline folders: generates where a mask is white."""

    INPAINTS = STARTS_FROM_NOISE = True
    _callback_tensor_inputs = ("latents", "prompt_embeds", "negative_prompt_embeds", "negative_pooled_prompt_embeds")

    __call__ = transformer_call(
        "{prompts} {mask} strength {steps} guidance_scale {negatives} {draw} {embeds} {pooled} {adapter} {result} "
        "joint_attention_kwargs {callback} max_sequence_length mu",
        "Generate where `mask_image` is white (1). The arguments are those of diffusers.",
        strength=0.6,
        guidance_scale=7.0,
        max_sequence_length=256,
    )

    def _decode_images(self, latents: np.ndarray, output_type: str) -> Any:
        mean, factor = latent_scale(self.vae.config)
        return super()._decode_images(latents - mean / factor, output_type)  # diffusers adds no shift_factor here


class FluxImg2ImgPipeline(_ImageStart, FluxPipeline):
    """Image to image with FLUX.1 pipeline folders."""

    __call__ = transformer_call(
        "{flux_texts} image height width strength {steps} guidance_scale {draw} {flux_embeds} {result} "
        "joint_attention_kwargs {step_end} max_sequence_length",
        "Generate from `image`, which is resized to height and width. The arguments are those of diffusers.",
        strength=0.6,
        num_inference_steps=FLUX_STEPS,
        guidance_scale=7.0,
        max_sequence_length=TEXT_TOKENS,
    )


class FluxInpaintPipeline(_ImageStart, FluxPipeline):
    """Inpainting with FLUX.1 pipeline folders: generates where a mask is white."""

    INPAINTS = TAKES_UNPACKED_LATENTS = True

    __call__ = transformer_call(
        "{flux_texts} {mask} strength {steps} guidance_scale {draw} {flux_embeds} {result} joint_attention_kwargs "
        "{step_end} max_sequence_length",
        "Generate where `mask_image` is white (1). The arguments are those of diffusers.",
        strength=0.6,
        num_inference_steps=FLUX_STEPS,
        guidance_scale=7.0,
        max_sequence_length=TEXT_TOKENS,
    )


class QwenImageImg2ImgPipeline(_ImageStart, QwenImagePipeline):
    """Image to image with Qwen-Image pipeline folders."""

    __call__ = transformer_call(
        "prompt negative_prompt true_cfg_scale image height width strength {steps} guidance_scale {draw} "
        "{masked_embeds} {result} attention_kwargs {step_end} max_sequence_length",
        "Generate from `image`, which is resized to height and width. The arguments are those of diffusers.",
        true_cfg_scale=4.0,
        strength=0.6,
    )


class QwenImageInpaintPipeline(_ImageStart, QwenImagePipeline):
    """Inpainting with Qwen-Image pipeline folders: generates where a mask is white."""

    INPAINTS = True

    __call__ = transformer_call(
        "prompt negative_prompt true_cfg_scale {mask} strength {steps} guidance_scale {draw} {masked_embeds} "
        "{result} attention_kwargs {step_end} max_sequence_length",
        "Generate where `mask_image` is white (1). The arguments are those of diffusers, whose `latents` fail too.",
        true_cfg_scale=4.0,
        strength=0.6,
    )

    def _check(self, call: SimpleNamespace, **scales: float | None) -> tuple[int, int, int]:
        if call.latents is not None:  # diffusers 0.42.1 raises too: it needs the noise and the image beside them
            raise InputError("QwenImageInpaintPipeline takes no latents: give image, and a generator for its noise.")
        return super()._check(call, **scales)
