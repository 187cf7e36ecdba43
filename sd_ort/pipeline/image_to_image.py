"""Pictures from a picture: image to image, and inpainting with ordinary UNets and with those made for it.

Random numbers are drawn in diffusers' order: the VAE encoder's, then the noise. So the same seed gives the same image.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import numpy as np
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils.torch_utils import randn_tensor
from PIL import Image

from sd_ort.core.errors import InputError
from sd_ort.family.conditioning import latent_scale
from sd_ort.family.schedulers import set_timesteps
from sd_ort.pipeline.device_loop import Kept
from sd_ort.pipeline.text_to_image import (
    Generator,
    PipelineOutput,
    Prompt,
    Request,
    StableDiffusionPipeline,
    StepCallback,
)

log = logging.getLogger("sd_ort")

# A PIL image, or a list of them: one for all prompts, or one a prompt.
Picture = Image.Image | list[Image.Image]


class StableDiffusionImg2ImgPipeline(StableDiffusionPipeline):
    """Image to image with SD 1.x, 2.x and SDXL folders, and SDXL's refiner."""

    NEEDS = (*StableDiffusionPipeline.NEEDS, "vae_encoder")

    def __call__(  # type: ignore[override]
        self,
        prompt: Prompt,
        image: Picture,
        strength: float = 0.8,
        num_inference_steps: int = 50,
        guidance_scale: float = 7.5,
        negative_prompt: Prompt | None = None,
        num_images_per_prompt: int = 1,
        eta: float = 0.0,
        generator: Generator = None,
        output_type: str = "pil",
        callback_on_step_end: StepCallback | None = None,
        progress: bool = True,
        height: int | None = None,
        width: int | None = None,
        control_image: Any = None,
        controlnet_conditioning_scale: float = 1.0,
    ) -> PipelineOutput:
        """Draw over `image`: noise takes its place for the first `strength` (0..1) of the schedule's steps.

        `height`, `width`: pixels the image is resized to; None for its own, rounded down to `size_multiple`. The other
        arguments are those of `StableDiffusionPipeline`. Raises InputError for what does not fit together.
        """
        size = self._size(image, height, width)
        request = self._request(
            prompt, negative_prompt, num_images_per_prompt, *size,
            num_inference_steps, guidance_scale, eta, generator, output_type, callback_on_step_end, progress,
        )  # fmt: skip
        conditioning = self._condition(request)
        pixels = self.image_processor.preprocess(image, *size).float()
        timesteps = self._timesteps(request, strength)
        control = self._control(request, control_image, controlnet_conditioning_scale, len(timesteps))
        if isinstance(request.generator, list):  # each image has numbers of its own
            pixels = self._for_batch(pixels, request, "images")
        start = self._for_batch(self.encode_image(pixels, request.generator), request, "images")
        noisy = self._add_noise(start, self._noise(request), timesteps, request)
        return self._sample(noisy, timesteps, conditioning, request, control)

    def encode_image(self, pixels: torch.Tensor, generator: Any) -> torch.Tensor:
        """Images (B, 3, H, W) in -1..1 -> latents (B, C, h, w) as the scheduler takes them, drawn from the VAE's
        distribution. `generator`: one, or one an image."""

        def run(part: np.ndarray) -> np.ndarray:
            return next(iter(self.models["vae_encoder"](sample=part).values()))

        encoded = self._tiles(run, pixels.numpy(), self.tile, self.tile // self.vae_scale_factor)
        latents = torch.from_numpy(encoded).float()
        if latents.shape[1] == 2 * self.latent_channels:  # a distribution, where a tiny autoencoder has latents
            mean, log_variance = latents.chunk(2, dim=1)
            std = torch.exp(0.5 * log_variance.clamp(-30, 20))
            if isinstance(generator, list):
                generator = generator[: len(mean)]
            latents = mean + std * randn_tensor(mean.shape, generator=generator, dtype=mean.dtype)
        offset, factor = latent_scale(self.vae_config)
        return (latents - offset) / factor

    def _size(self, image: Picture, height: int | None, width: int | None) -> tuple[int, int]:
        first = image[0] if isinstance(image, list) and image else image
        if not isinstance(first, Image.Image):
            raise InputError("no image was given: pass a PIL image, or a list of them.")
        multiple = self.size_multiple
        own_width, own_height = (max(multiple, side // multiple * multiple) for side in first.size)
        if (height, width) == (None, None) and (own_width, own_height) != first.size:
            log.info("the image of %dx%d pixels is resized to %dx%d.", *first.size, own_width, own_height)
        return height or own_height, width or own_width

    def _timesteps(self, request: Request, strength: float) -> torch.Tensor:
        """The last `strength` of the schedule. Raises InputError when nothing of it is left."""
        if not 0 < strength <= 1:
            raise InputError(f"strength {strength} is not above 0 and at most 1.")
        scheduler, steps = request.scheduler, request.steps
        set_timesteps(scheduler, steps)
        kept = int(steps * strength)
        if kept < 1:
            raise InputError(f"{steps} steps at strength {strength} leave none to draw: raise one of them.")
        start = (steps - kept) * scheduler.order
        if hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(start)
        timesteps: torch.Tensor = scheduler.timesteps[start:]
        return timesteps

    def _add_noise(
        self, latents: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor, request: Request
    ) -> torch.Tensor:
        noisy: torch.Tensor = request.scheduler.add_noise(latents, noise, timesteps[:1].repeat(len(latents)))
        return noisy


class StableDiffusionInpaintPipeline(StableDiffusionImg2ImgPipeline):
    """Draw where a mask is white. Ordinary UNets get the rest of the picture back after every step; UNets of 9
    channels (sd15-inpaint) see mask and masked picture."""

    def __call__(  # type: ignore[override]
        self,
        prompt: Prompt,
        image: Picture,
        mask_image: Picture,
        strength: float = 1.0,
        num_inference_steps: int = 50,
        guidance_scale: float = 7.5,
        negative_prompt: Prompt | None = None,
        num_images_per_prompt: int = 1,
        eta: float = 0.0,
        generator: Generator = None,
        output_type: str = "pil",
        callback_on_step_end: StepCallback | None = None,
        progress: bool = True,
        height: int | None = None,
        width: int | None = None,
    ) -> PipelineOutput:
        """As image to image; `mask_image`: PIL image(s) of the same size, white where to draw. At `strength` 1 what
        is under the mask does not matter."""
        size = self._size(image, height, width)
        request = self._request(
            prompt, negative_prompt, num_images_per_prompt, *size,
            num_inference_steps, guidance_scale, eta, generator, output_type, callback_on_step_end, progress,
        )  # fmt: skip
        conditioning = self._condition(request)
        pixels = self.image_processor.preprocess(image, *size).float()
        mask = self._mask(mask_image, size)
        timesteps = self._timesteps(request, strength)
        blends = self.unet_config.get("in_channels", 4) == self.latent_channels

        start = None
        if blends or strength < 1:
            start = self._for_batch(self.encode_image(pixels, request.generator), request, "images")
        noise = self._noise(request)
        if start is None or strength == 1:
            latents = noise * request.scheduler.init_noise_sigma
        else:
            latents = self._add_noise(start, noise, timesteps, request)
        small = self._for_batch(self._shrink(mask, request), request, "masks")
        if blends:
            assert start is not None
            factors = noise_factors(request.scheduler, timesteps)
            kept = Kept(start.numpy(), noise.numpy(), small.numpy(), *factors)
            return self._sample(latents, timesteps, conditioning, request, kept=kept)
        masked = self.encode_image(pixels * (mask < 0.5), request.generator)
        channels = torch.cat([small, self._for_batch(masked, request, "images")], 1)
        return self._sample(latents, timesteps, conditioning, request, channels=channels)

    def _check_unet(self) -> None:
        channels = self.unet_config.get("in_channels", 4)
        if channels not in (self.latent_channels, 2 * self.latent_channels + 1):
            raise InputError(f"{self.folder} has a UNet of {channels} channels, which no inpainting takes.")

    def _mask(self, mask: Picture, size: tuple[int, int]) -> torch.Tensor:
        """(B, 1, H, W) of 0 and 1."""
        processor = VaeImageProcessor(
            self.vae_scale_factor, do_normalize=False, do_binarize=True, do_convert_grayscale=True
        )
        return processor.preprocess(mask, *size).float()

    def _shrink(self, mask: torch.Tensor, request: Request) -> torch.Tensor:
        return torch.nn.functional.interpolate(mask, size=self._latent_shape(request)[2:])


def noise_factors(scheduler: Any, timesteps: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Factors (T + 1,) of picture and noise in a picture as noisy as each step expects it; after the last, 1 and 0."""
    probe, one, none = copy.deepcopy(scheduler), torch.ones(1, 1), torch.zeros(1, 1)
    first = getattr(probe, "begin_index", None) or 0
    factors = []
    for index in range(len(timesteps)):
        if hasattr(probe, "_step_index"):
            probe._step_index = first + index  # schedulers that count their steps look the noise up by that
        time = timesteps[index : index + 1]
        factors.append([float(probe.add_noise(one, none, time)), float(probe.add_noise(none, one, time))])
    picture, noise = np.array([*factors, [1.0, 0.0]], np.float32).T
    return picture, noise
