"""Pictures from a picture: image to image, and inpainting with ordinary UNets and with those made for it.

Random numbers are drawn in diffusers' order: the VAE encoder's, then the noise. So the same seed gives the same image.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from sd_ort.core.errors import InputError
from sd_ort.pipelines.images import as_array, for_batch, is_latents, nearest, preprocess, readable, size_of
from sd_ort.pipelines.output import PipelineOutput
from sd_ort.pipelines.request import Picture, Prompt, Request
from sd_ort.pipelines.sampling_job import InpaintBlend
from sd_ort.pipelines.text_to_image import StableDiffusionPipeline, cutoff_timestep

if TYPE_CHECKING:
    import torch

    from sd_ort.pipelines.scheduler import Schedule

log = logging.getLogger("sd_ort")


class StableDiffusionImg2ImgPipeline(StableDiffusionPipeline):
    """Image to image with SD 1.x, 2.x and SDXL folders, and SDXL's refiner."""

    REQUIRED_COMPONENTS = (*StableDiffusionPipeline.REQUIRED_COMPONENTS, "vae_encoder")
    REJECTED_ARGUMENTS: tuple[str, ...] = ("mask_image", "masked_image_latents", "padding_mask_crop")

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
        schedule = self._schedule(request)
        if request.latents is not None:
            noisy = self._noise(request, request.latents)
        else:
            pixels = preprocess(request.image, *request.size, latent_channels=self.vae.latent_channels)
            noisy = self._start(pixels, request)
            if request.denoising_start is None:
                noisy = self._add_noise(noisy, self._noise(request), schedule)
        return self._sample(noisy, schedule, conditioning, request)

    @property
    def _defaults(self) -> Mapping[str, Any]:
        return {**super()._defaults, "strength": 0.3 if self.is_xl else 0.8}

    def encode_image(self, pixels: torch.Tensor, generator: Any) -> torch.Tensor:
        """Images (B, 3, H, W) in -1..1 -> latents (B, C, h, w) as the scheduler takes them, drawn from the VAE's
        distribution. `generator`: one, or one an image."""
        import torch

        return torch.from_numpy(self.vae.to_latents(pixels.numpy(), generator))

    def _start(self, pixels: np.ndarray, request: Request) -> np.ndarray:
        """Latents of all images; a picture that is latents already stays as it is."""
        if is_latents(request.image, self.vae.latent_channels):
            return for_batch(pixels, request, "images")
        if isinstance(request.generator, list):  # each image has numbers of its own
            pixels = for_batch(pixels, request, "images")
        return for_batch(self.vae.to_latents(pixels, request.generator), request, "images")

    def _size(self, request: Request) -> tuple[int, int]:
        multiple = self.size_multiple
        own = size_of(request.image, self.vae.latent_channels, self.vae_scale_factor)
        height, width = (max(multiple, side // multiple * multiple) for side in own)
        if request.height is None and request.width is None and (height, width) != own:
            log.info("the image of %dx%d pixels is resized to %dx%d.", *own[::-1], width, height)
        return request.height or height, request.width or width

    def _schedule(self, request: Request) -> Schedule:
        """The last `strength` of the schedule, or what follows `denoising_start`, up to `denoising_end`.

        Raises InputError when nothing of it is left.
        """
        timetable, strength = request.timetable, request.strength
        timesteps, order = timetable.timesteps, timetable.order
        assert strength is not None
        if not 0 < strength <= 1:
            raise InputError(f"strength {strength} is not above 0 and at most 1.")
        if request.denoising_start:
            kept = int((timesteps < cutoff_timestep(timetable, request.denoising_start)).sum())
            if order == 2 and kept % 2 == 0:
                kept += 1  # no step of two predictions is cut in two
            start = len(timesteps) - kept
        else:
            kept = int(request.num_inference_steps * strength)
            start = (request.num_inference_steps - kept) * order
        if kept < 1:
            raise InputError(
                f"{request.num_inference_steps} steps at strength {strength} leave none to draw: raise one of them."
            )
        schedule: Schedule = timetable.schedule(start, self._end(request))
        return schedule

    @staticmethod
    def _add_noise(latents: np.ndarray, noise: np.ndarray, schedule: Schedule) -> np.ndarray:
        noisy: np.ndarray = schedule.image_factors[0] * latents + schedule.noise_factors[0] * noise
        return noisy


class StableDiffusionInpaintPipeline(StableDiffusionImg2ImgPipeline):
    """Draw where a mask is white. Ordinary UNets get the rest of the picture back after every step; UNets of 9
    channels (sd15-inpaint) see mask and masked picture."""

    INPAINT = True
    REJECTED_ARGUMENTS = ()

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
        schedule = self._schedule(request)
        blends = self.unet_config.get("in_channels", 4) == self.vae.latent_channels
        start = None
        if blends or (request.strength or 1) < 1 or request.denoising_start is not None:
            start = self._start(pixels, request)
        noise = self._noise(request, request.latents)
        if request.denoising_start is not None:
            assert start is not None
            latents = start
        elif start is None or request.strength == 1 or request.latents is not None:
            latents = noise * np.float32(schedule.init_noise_sigma)
        else:
            latents = self._add_noise(start, noise, schedule)
        small = for_batch(nearest(mask, *self._latent_shape(request)[2:]), request, "masks")
        more: dict[str, Any] = {}
        if blends:
            assert start is not None
            more["kept"] = InpaintBlend(start, noise, small, schedule.image_factors, schedule.noise_factors)
        else:
            more["channels"] = np.concatenate([small, self._masked(pixels, mask, request)], 1)
        output = self._sample(latents, schedule, conditioning, request, **more)
        return output if region is None else self._put_back(output, request, region)

    @property
    def _defaults(self) -> Mapping[str, Any]:
        return {**super()._defaults, "strength": 0.9999 if self.is_xl else 1.0}

    def _check_unet(self) -> None:
        channels = self.unet_config.get("in_channels", 4)
        if channels not in (self.vae.latent_channels, 2 * self.vae.latent_channels + 1):
            raise InputError(f"{self.folder} has a UNet of {channels} channels, which no inpainting takes.")

    def _pictures(self, request: Request) -> tuple[np.ndarray, np.ndarray, Any]:
        """Pixels (B, 3, H, W), the mask (B, 1, H, W) of 0 and 1, and the region of the picture that is drawn, if not
        all of it."""
        channels, (height, width) = self.vae.latent_channels, request.size
        if request.padding_mask_crop is None:
            pixels = preprocess(request.image, height, width, latent_channels=channels)
            return pixels, preprocess(request.mask_image, height, width, mask=True), None
        if not hasattr(request.image, "crop") or not hasattr(request.mask_image, "crop"):
            raise InputError("padding_mask_crop takes one PIL image and one PIL mask.")
        from diffusers.image_processor import VaeImageProcessor

        masks = VaeImageProcessor(
            self.vae_scale_factor, do_normalize=False, do_binarize=True, do_convert_grayscale=True
        )
        region = masks.get_crop_region(request.mask_image, width, height, pad=request.padding_mask_crop)
        how = {"crops_coords": region, "resize_mode": "fill"}
        pixels, mask = (
            processor.preprocess(image, height, width, **how).float().numpy()
            for processor, image in ((self.image_processor, request.image), (masks, request.mask_image))
        )
        return pixels, mask, region

    def _put_back(self, output: PipelineOutput, request: Request, region: Any) -> PipelineOutput:
        """What was drawn of a region, laid over the picture. Raises InputError for another output than PIL images."""
        if request.output_type != "pil":
            raise InputError("padding_mask_crop gives PIL images: leave output_type at pil.")
        laid = self.image_processor.apply_overlay
        output.images = [laid(request.mask_image, request.image, drawn, region) for drawn in output.images]
        return output

    def _masked(self, pixels: np.ndarray, mask: np.ndarray, request: Request) -> np.ndarray:
        """Latents of the picture without what is under the mask, for UNets that see them."""
        if request.masked_image_latents is not None:
            return for_batch(as_array(request.masked_image_latents), request, "masked images")
        masked = self.vae.to_latents(pixels * (mask < 0.5), request.generator)
        return for_batch(masked, request, "images")
