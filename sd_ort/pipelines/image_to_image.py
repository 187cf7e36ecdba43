"""Image to image, and inpainting with ordinary UNets and with UNets of 9 input channels.

Random numbers are sampled in diffusers' order: the VAE encoder's, then the noise. The same seed gives the same image.
"""

from __future__ import annotations

import logging
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from sd_ort.core.errors import InputError
from sd_ort.pipelines import controlnet_inputs
from sd_ort.pipelines.arguments import GUIDED_TENSORS
from sd_ort.pipelines.call_signature import diffusers_call
from sd_ort.pipelines.images import as_array, as_image, is_latents, is_pil, nearest, preprocess, repeat_to_batch
from sd_ort.pipelines.mask_crop import crop_region, fill, overlay
from sd_ort.pipelines.noise import noise_generators
from sd_ort.pipelines.output import PipelineOutput
from sd_ort.pipelines.request import Generator, Request, check_generators
from sd_ort.pipelines.sampling_job import InpaintBlend
from sd_ort.pipelines.text_to_image import StableDiffusionPipeline, cutoff_timestep

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from sd_ort.pipelines.scheduler import Schedule

log = logging.getLogger("sd_ort")


class StableDiffusionImg2ImgPipeline(StableDiffusionPipeline):
    """Image to image with SD 1.x, 2.x and SDXL folders, and SDXL's refiner."""

    REQUIRED_COMPONENTS = (*StableDiffusionPipeline.REQUIRED_COMPONENTS, "vae_encoder")
    TASK = "Img2Img"
    NOISE_FOR_EACH_IMAGE = True  # whether the VAE encoder samples for each image of a list of generators
    REJECTED_ARGUMENTS: tuple[str, ...] = ("mask_image", "masked_image_latents", "padding_mask_crop")

    __call__ = diffusers_call(
        "prompt image strength {schedule} guidance_scale negative_prompt num_images_per_prompt eta generator {embeds} "
        "{adapter} {output} {callback} kwargs",
        """Generate from `image`: noise takes its place for the first `strength` (0..1) of the schedule's steps.

        `image`: one or several, see `pipelines.request.Picture`. The result has its size, down to whole latents.
        """,
        strength=0.8,
    )

    def _read_images(self, request: Request) -> None:
        request.image = as_image(request.image)
        if request.control_image is not None:
            count = max(1, len(controlnet_inputs.names(self.models)))
            request.control_image = controlnet_inputs.by_controlnet(request.control_image, count)

    def _run_request(self, request: Request) -> PipelineOutput:
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

    def prepare_latents(  # type: ignore[override]
        self, image: Tensor, timestep: Tensor, batch_size: int, num_images_per_prompt: int, dtype: torch.dtype,
        device: Any, generator: Generator = None, *, add_noise: bool = True,
    ) -> Tensor:  # fmt: skip
        """Return latents (B, C, h, w) of `image`, pixels (N, 3, H, W) in -1..1 or latents, with the noise of `timestep`
        unless `add_noise` is False."""
        latents = self._image_latents(image, batch_size * num_images_per_prompt, generator).to(device, dtype)
        if not add_noise:
            return latents
        noise = self._prepare_noise(latents.shape, dtype, device, generator, None)
        return self.scheduler.add_noise(latents, noise, timestep)

    def _image_latents(self, image: Tensor, batch_size: int, generator: Generator) -> Tensor:
        """Return the latents of pixels or latents, tiled to a batch."""
        import torch

        check_generators(generator, batch_size)
        request = Request(
            prompt="", num_images_per_prompt=batch_size, image=image, generator=noise_generators(generator)
        )
        return torch.from_numpy(self._start(as_array(image), request))

    def _start(self, pixels: np.ndarray, request: Request) -> np.ndarray:
        """Return the latents of all images; latents that the caller passed as image are not encoded."""
        if is_latents(request.image, self.vae.latent_channels):
            return repeat_to_batch(pixels, request.batch, "images")
        if isinstance(request.generator, list) and self.NOISE_FOR_EACH_IMAGE:
            pixels = repeat_to_batch(pixels, request.batch, "images")
        return repeat_to_batch(self.vae.to_latents(pixels, request.generator), request.batch, "images")

    def _size(self, request: Request) -> tuple[int, int]:
        return self._size_of(request, request.image)

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
            step_count = int((timesteps < cutoff_timestep(timetable, request.denoising_start)).sum())
            if order == 2 and step_count % 2 == 0:
                step_count += 1  # no step of two predictions is cut in two
            start = len(timesteps) - step_count
        elif self.STRENGTH_IN_SCHEDULER:
            step_count, start = len(timesteps), 0
        else:
            step_count = int(request.num_inference_steps * strength)
            start = (request.num_inference_steps - step_count) * order
        end = self._end(request)
        if step_count < 1 or start >= end:
            part = f"strength {strength}" + (f" and denoising_end {request.denoising_end}" if step_count else "")
            raise InputError(f"{request.num_inference_steps} steps at {part} leave none: raise one of them.")
        return timetable.schedule(start, end)

    @staticmethod
    def _add_noise(latents: np.ndarray, noise: np.ndarray, schedule: Schedule) -> np.ndarray:
        if np.isnan(schedule.image_factors[0]):
            raise InputError("This scheduler adds no noise to an image: use euler, ddim or dpmsolver.")
        return schedule.image_factors[0] * latents + schedule.noise_factors[0] * noise


class StableDiffusionInpaintPipeline(StableDiffusionImg2ImgPipeline):
    """Inpainting where a mask is white.

    For ordinary UNets, the rest of the image is restored after every step. UNets of 9 channels (sd15-inpaint) read mask
    and masked image.
    """

    NOISE_FOR_EACH_IMAGE = False
    _callback_tensor_inputs: tuple[str, ...] = (*GUIDED_TENSORS, "mask", "masked_image_latents")
    TASK = "Inpaint"
    SIZE_OF_IMAGE = False  # whether the image's size, and not the model's, stands for none
    REJECTED_ARGUMENTS = ()

    __call__ = diffusers_call(
        "prompt image mask_image masked_image_latents height width padding_mask_crop strength {schedule} "
        "guidance_scale negative_prompt {noise} {embeds} {adapter} {output} {callback} kwargs",
        """Generate where `mask_image` is white (1); at `strength` 1 what is under the mask does not matter.

        `masked_image_latents`: latents of the image without what is under the mask. `padding_mask_crop`: generate the
        surroundings of the mask alone, with so many pixels around it, enlarged.
        """,
        strength=1.0,
    )

    def prepare_latents(  # type: ignore[override]
        self, batch_size: int, num_channels_latents: int, height: int, width: int, dtype: torch.dtype, device: Any,
        generator: Generator, latents: Tensor | None = None, image: Tensor | None = None,
        timestep: Tensor | None = None, *, is_strength_max: bool = True, add_noise: bool = True,
        return_noise: bool = False, return_image_latents: bool = False,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Return latents (B, C, h, w): noise, `latents` or, below full strength, `image` with the noise of `timestep`.

        Without `add_noise`, the latents of `image`. `return_noise` and `return_image_latents` append these.
        """
        image_latents: Any = None
        if return_image_latents or not add_noise or (latents is None and not is_strength_max):
            if image is None:
                raise InputError("prepare_latents needs an image here.")
            image_latents = self._image_latents(image, batch_size, generator).to(device, dtype)
        shape = batch_size, num_channels_latents, height // self.vae_scale_factor, width // self.vae_scale_factor
        noise = self._prepare_noise(shape, dtype, device, generator, latents if add_noise else None)
        if not add_noise:
            start = image_latents
        elif latents is None and not is_strength_max:
            start = self.scheduler.add_noise(image_latents, noise, timestep)
        else:
            start = noise * self.scheduler.init_noise_sigma
        return (start, *[noise] * return_noise, *[image_latents] * return_image_latents)

    def _read_images(self, request: Request) -> None:
        super()._read_images(request)
        request.mask_image = as_image(request.mask_image, "mask")

    def _size(self, request: Request) -> tuple[int, int]:
        if self.SIZE_OF_IMAGE:
            return super()._size(request)
        return request.height or self.default_size, request.width or self.default_size

    def _run_request(self, request: Request) -> PipelineOutput:
        conditioning = self._condition(request)
        pixels, mask, region = self._pictures(request)
        schedule = self._schedule(request)
        blends = self.unet_config.get("in_channels", 4) == self.vae.latent_channels
        start = None
        below_full = (request.strength or 1) < 1 and request.latents is None
        if blends or below_full or request.denoising_start is not None:
            start = self._start(pixels, request)
        noise = self._noise(request, request.latents)
        if request.denoising_start is not None:
            assert start is not None
            latents = start
        elif start is None or request.strength == 1 or request.latents is not None:
            latents = noise * np.float32(schedule.init_noise_sigma)
        else:
            latents = self._add_noise(start, noise, schedule)
        small = repeat_to_batch(nearest(mask, *self._latent_shape(request)[2:]), request.batch, "masks")
        more: dict[str, Any] = {}
        if blends:
            assert start is not None
            masked = None
            if "masked_image_latents" in request.callback_tensors:
                masked = self._masked(pixels, mask, request)
            elif request.masked_image_latents is None:  # diffusers encodes the masked image here too
                self.vae.skip_noise(len(pixels), latents.shape, request.generator)
            more["blend"] = InpaintBlend(start, noise, small, schedule.image_factors, schedule.noise_factors, masked)
        else:
            more["channels"] = np.concatenate([small, self._masked(pixels, mask, request)], 1)
        output = self._sample(latents, schedule, conditioning, request, **more)
        return output if region is None else self._put_back(output, request, region)

    def _check_unet(self) -> None:
        channels = self.unet_config.get("in_channels", 4)
        if channels not in (self.vae.latent_channels, 2 * self.vae.latent_channels + 1):
            raise InputError(f"{self.folder} has a UNet of {channels} channels, which no inpainting takes.")

    @cached_property
    def mask_processor(self) -> Any:
        """diffusers' image processor for masks."""
        from diffusers.image_processor import VaeImageProcessor

        return VaeImageProcessor(self.vae_scale_factor, do_normalize=False, do_binarize=True, do_convert_grayscale=True)

    def _pictures(self, request: Request) -> tuple[np.ndarray, np.ndarray, Any]:
        """Return pixels (B, 3, H, W), the mask (B, 1, H, W) of 0 and 1, and the generated region or None."""
        image: Any = request.image
        mask_image: Any = request.mask_image
        region = None
        height, width = request.size
        if request.padding_mask_crop is not None:
            if not (is_pil(image) and is_pil(mask_image)):
                raise InputError("padding_mask_crop takes one PIL image and one PIL mask.")
            region = crop_region(mask_image, width, height, request.padding_mask_crop)

            def cropped(image: Any) -> Any:
                if isinstance(image, list):
                    return [cropped(each) for each in image]
                return fill(image, region, width, height) if is_pil(image) else image

            request.control_image = cropped(request.control_image)
            image, mask_image = cropped(image), cropped(mask_image)
        pixels = preprocess(image, height, width, latent_channels=self.vae.latent_channels)
        return pixels, preprocess(mask_image, height, width, mask=True), region

    def _put_back(self, output: PipelineOutput, request: Request, region: Any) -> PipelineOutput:
        """The generated region laid over the image. Raises InputError for another output than PIL images."""
        if request.output_type != "pil":
            raise InputError("padding_mask_crop gives PIL images: leave output_type at pil.")
        mask: Any = request.mask_image  # `_pictures` takes PIL images alone
        image: Any = request.image
        output.images = [overlay(mask, image, patch, region) for patch in output.images]
        return output

    def _masked(self, pixels: np.ndarray, mask: np.ndarray, request: Request) -> np.ndarray:
        """Return the latents of the image without the masked part, for UNets of 9 channels."""
        if request.masked_image_latents is not None:
            return repeat_to_batch(as_array(request.masked_image_latents), request.batch, "masked images")
        masked = self.vae.to_latents(pixels * (mask < 0.5), request.generator)
        return repeat_to_batch(masked, request.batch, "images")
