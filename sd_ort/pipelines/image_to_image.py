"""Pictures from a picture: image to image, and inpainting with ordinary UNets and with those made for it.

Random numbers are drawn in diffusers' order: the VAE encoder's, then the noise. So the same seed gives the same image.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from diffusers.image_processor import VaeImageProcessor

from sd_ort.core.errors import InputError
from sd_ort.pipelines.images import for_batch, is_latents, readable, size_of
from sd_ort.pipelines.output import PipelineOutput
from sd_ort.pipelines.request import Picture, Prompt, Request
from sd_ort.pipelines.sampling_job import Kept
from sd_ort.pipelines.text_to_image import StableDiffusionPipeline, cutoff

log = logging.getLogger("sd_ort")


class StableDiffusionImg2ImgPipeline(StableDiffusionPipeline):
    """Image to image with SD 1.x, 2.x and SDXL folders, and SDXL's refiner."""

    NEEDS = (*StableDiffusionPipeline.NEEDS, "vae_encoder")
    LEAVES: tuple[str, ...] = ("mask_image", "masked_image_latents", "padding_mask_crop")

    def __call__(  # type: ignore[override]
        self,
        prompt: Prompt | None = None,
        image: Picture | None = None,
        strength: float | None = None,
        num_inference_steps: int | None = None,
        **arguments: Any,
    ) -> Any:
        """Draw over `image`: noise takes its place for the first `strength` (0..1) of the schedule's steps.

        `image`: one or several, see `pipeline.request.Picture`. `height`, `width`: pixels it is resized to; None for
        its own, rounded down to `size_multiple`. `latents`: its noisy latents, made beforehand. The other arguments,
        results and errors are those of `StableDiffusionPipeline`.
        """
        asked = self._request(
            prompt=prompt, image=image, strength=strength, num_inference_steps=num_inference_steps, **arguments
        )
        asked.image = readable(asked.image)
        return self._answer(asked, self._size(asked))

    def _draw(self, request: Request) -> PipelineOutput:
        conditioning = self._condition(request)
        timesteps = self._timesteps(request)
        controls = self._controls(request, len(timesteps))
        if request.latents is not None:
            noisy = torch.from_numpy(self._noise(request, request.latents))
        else:
            pixels = self.image_processor.preprocess(request.image, *request.size).float()
            start = self._start(pixels, request)
            noisy = start
            if request.denoising_start is None:
                noisy = self._add_noise(start, self._noise(request), timesteps, request)
        return self._sample(noisy.numpy(), timesteps, conditioning, request, controls)

    @property
    def _defaults(self) -> Mapping[str, Any]:
        return {**super()._defaults, "strength": 0.3 if self.is_xl else 0.8}

    def encode_image(self, pixels: torch.Tensor, generator: Any) -> torch.Tensor:
        """Images (B, 3, H, W) in -1..1 -> latents (B, C, h, w) as the scheduler takes them, drawn from the VAE's
        distribution. `generator`: one, or one an image."""
        return torch.from_numpy(self.vae.to_latents(pixels.numpy(), generator))

    def _start(self, pixels: torch.Tensor, request: Request) -> torch.Tensor:
        """Latents of all images; a picture that is latents already stays as it is."""
        if is_latents(pixels, self.vae.latent_channels):
            return for_batch(pixels, request, "images")
        if isinstance(request.generator, list):  # each image has numbers of its own
            pixels = for_batch(pixels, request, "images")
        return for_batch(self.encode_image(pixels, request.generator), request, "images")

    def _size(self, request: Request) -> tuple[int, int]:
        multiple = self.size_multiple
        own = size_of(request.image, self.vae.latent_channels, self.vae_scale_factor)
        height, width = (max(multiple, side // multiple * multiple) for side in own)
        if request.height is None and request.width is None and (height, width) != own:
            log.info("the image of %dx%d pixels is resized to %dx%d.", *own[::-1], width, height)
        return request.height or height, request.width or width

    def _timesteps(self, request: Request) -> torch.Tensor:
        """The last `strength` of the schedule, or what follows `denoising_start`, up to `denoising_end`.

        Raises InputError when nothing of it is left.
        """
        every, scheduler, strength = self._schedule(request), request.scheduler, request.strength
        assert strength is not None
        if not 0 < strength <= 1:
            raise InputError(f"strength {strength} is not above 0 and at most 1.")
        if request.denoising_start:
            kept = int((every < cutoff(scheduler, request.denoising_start)).sum())
            if scheduler.order == 2 and kept % 2 == 0:
                kept += 1  # no step of two predictions is cut in two
            start = len(every) - kept
        else:
            kept = int(request.num_inference_steps * strength)
            start = (request.num_inference_steps - kept) * scheduler.order
        if kept < 1:
            raise InputError(
                f"{request.num_inference_steps} steps at strength {strength} leave none to draw: raise one of them."
            )
        if hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(start)
        return self._end(every[start:], request)

    def _add_noise(
        self, latents: torch.Tensor, noise: np.ndarray, timesteps: torch.Tensor, request: Request
    ) -> torch.Tensor:
        noisy: torch.Tensor = request.scheduler.add_noise(
            latents, torch.from_numpy(noise), timesteps[:1].repeat(len(latents))
        )
        return noisy


class StableDiffusionInpaintPipeline(StableDiffusionImg2ImgPipeline):
    """Draw where a mask is white. Ordinary UNets get the rest of the picture back after every step; UNets of 9
    channels (sd15-inpaint) see mask and masked picture."""

    INPAINT = True
    LEAVES = ()

    def __call__(  # type: ignore[override]
        self,
        prompt: Prompt | None = None,
        image: Picture | None = None,
        mask_image: Picture | None = None,
        strength: float | None = None,
        num_inference_steps: int | None = None,
        **arguments: Any,
    ) -> Any:
        """As image to image. `mask_image`: picture(s) of the same size, white (1) where to draw. At `strength` 1 what
        is under the mask does not matter. `masked_image_latents`: the latents of the picture without it, made
        beforehand. `padding_mask_crop`: draw the mask's surroundings alone, with so many pixels around, enlarged."""
        asked = self._request(
            prompt=prompt, image=image, mask_image=mask_image, strength=strength,
            num_inference_steps=num_inference_steps, **arguments,
        )  # fmt: skip
        asked.image, asked.mask_image = readable(asked.image), readable(asked.mask_image, "mask")
        return self._answer(asked, self._size(asked))

    def _draw(self, request: Request) -> PipelineOutput:
        conditioning = self._condition(request)
        pixels, mask, region = self._pictures(request)
        timesteps = self._timesteps(request)
        controls = self._controls(request, len(timesteps))
        blends = self.unet_config.get("in_channels", 4) == self.vae.latent_channels
        start = None
        if blends or (request.strength or 1) < 1 or request.denoising_start is not None:
            start = self._start(pixels, request)
        noise = self._noise(request, request.latents)
        if request.denoising_start is not None:
            assert start is not None
            latents = start
        elif start is None or request.strength == 1 or request.latents is not None:
            latents = torch.from_numpy(noise) * request.scheduler.init_noise_sigma
        else:
            latents = self._add_noise(start, noise, timesteps, request)
        small = for_batch(self._shrink(mask, request), request, "masks")
        more: dict[str, Any] = {}
        if blends:
            assert start is not None
            factors = noise_factors(request.scheduler, timesteps)
            more["kept"] = Kept(start.numpy(), noise, small.numpy(), *factors)
        else:
            more["channels"] = torch.cat([small, self._masked(pixels, mask, request)], 1).numpy()
        output = self._sample(latents.numpy(), timesteps, conditioning, request, controls, **more)
        return output if region is None else self._put_back(output, request, region)

    @property
    def _defaults(self) -> Mapping[str, Any]:
        return {**super()._defaults, "strength": 0.9999 if self.is_xl else 1.0}

    def _check_unet(self) -> None:
        channels = self.unet_config.get("in_channels", 4)
        if channels not in (self.vae.latent_channels, 2 * self.vae.latent_channels + 1):
            raise InputError(f"{self.folder} has a UNet of {channels} channels, which no inpainting takes.")

    @property
    def mask_processor(self) -> Any:
        """diffusers' image processor for masks: (B, 1, H, W) of 0 and 1."""
        return VaeImageProcessor(self.vae_scale_factor, do_normalize=False, do_binarize=True, do_convert_grayscale=True)

    def _pictures(self, request: Request) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Pixels (B, 3, H, W), the mask (B, 1, H, W) of 0 and 1, and the region of the picture that is drawn, if not
        all of it."""
        masks = self.mask_processor
        height, width = request.size
        region, how = None, {}
        if request.padding_mask_crop is not None:
            if not hasattr(request.image, "crop") or not hasattr(request.mask_image, "crop"):
                raise InputError("padding_mask_crop takes one PIL image and one PIL mask.")
            region = masks.get_crop_region(request.mask_image, width, height, pad=request.padding_mask_crop)
            how = {"crops_coords": region, "resize_mode": "fill"}
        pixels = self.image_processor.preprocess(request.image, height, width, **how).float()
        return pixels, masks.preprocess(request.mask_image, height, width, **how).float(), region

    def _put_back(self, output: PipelineOutput, request: Request, region: Any) -> PipelineOutput:
        """What was drawn of a region, laid over the picture. Raises InputError for another output than PIL images."""
        if request.output_type != "pil":
            raise InputError("padding_mask_crop gives PIL images: leave output_type at pil.")
        laid = self.image_processor.apply_overlay
        output.images = [laid(request.mask_image, request.image, drawn, region) for drawn in output.images]
        return output

    def _masked(self, pixels: torch.Tensor, mask: torch.Tensor, request: Request) -> torch.Tensor:
        """Latents of the picture without what is under the mask, for UNets that see them."""
        if request.masked_image_latents is not None:
            return for_batch(request.masked_image_latents.float(), request, "masked images")
        masked = self.encode_image(pixels * (mask < 0.5), request.generator)
        return for_batch(masked, request, "images")

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
