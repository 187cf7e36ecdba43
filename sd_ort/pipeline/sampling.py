"""From the first latents to the last: the sampling loop on the host, and the choice of the loop on the device."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from sd_ort.core.errors import InputError
from sd_ort.core.progress import step_bar
from sd_ort.family.conditioning import latent_scale
from sd_ort.family.schedule import LinearSchedule, linear_schedule
from sd_ort.pipeline.control import Control
from sd_ort.pipeline.denoiser import Denoiser
from sd_ort.pipeline.device_loop import DeviceLoop
from sd_ort.pipeline.drawing import Drawing, Kept, check_finite
from sd_ort.pipeline.output import PipelineOutput
from sd_ort.pipeline.request import Request
from sd_ort.pipeline.text import Conditioning
from sd_ort.runtime.providers import warn_once

if TYPE_CHECKING:
    from sd_ort.pipeline.vae import Vae
    from sd_ort.runtime.components import Components


class Sampling:
    """What draws, for a pipeline with these attributes, `_finish` and `_noise`."""

    models: Components
    vae: Vae
    loop: DeviceLoop
    device_loop: bool
    safety_checker: bool

    def _finish(self, latents: torch.Tensor, request: Request) -> PipelineOutput:
        raise NotImplementedError

    def _noise(self, request: Request, given: Any = None) -> torch.Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def _sample(
        self,
        latents: torch.Tensor,
        timesteps: torch.Tensor,
        conditioning: Conditioning,
        request: Request,
        controls: Sequence[Control] = (),
        *,
        channels: torch.Tensor | None = None,
        kept: Kept | None = None,
    ) -> PipelineOutput:
        """From the first latents to what the caller asked for, on the device or on the host.

        `channels` (B, C', h, w) go behind the latents' channels, unscaled: the mask and the masked picture of an
        inpainting UNet. `kept`: what every step leaves of a picture.
        """
        told = {"encoder_hidden_states": conditioning.embeddings, **conditioning.added}
        # A ControlNet on the device sees what the UNet sees: all rows, and no channels of a mask.
        alike = not controls or (channels is None and not request.guess_mode)
        schedule = self._device_schedule(request, timesteps) if alike else None
        if schedule is None:
            if self.models.partner is not None:
                warn_once("guidance is not split, and one device draws: latents go through the host at every step.")
            denoiser = Denoiser(self.models, told, timesteps, controls)
            drawn = self._denoise(latents, timesteps, denoiser, request, channels, kept)
            check_finite(drawn.numpy(), "unet")
            return self._finish(drawn, request)
        if "controlnet" in self.models and not controls:
            raise InputError("this UNet was exported for a ControlNet: give a control_image (--control-image).")
        checked = self.safety_checker and "safety_checker" in self.models
        apart = checked or self.vae.use_tiling or self.vae.use_slicing or "vae_decoder" in self.models.elsewhere
        whole = request.output_type == "pil" and not apart
        mean, factor = latent_scale(self.vae.config)
        draws = [self._noise(request).numpy() for _ in range(schedule.draws)]
        made = self.loop.run(
            Drawing(
                latents.numpy(),
                {name: value.numpy() for name, value in told.items()},
                schedule,
                guidance=request.guidance,
                rescale=request.guidance_rescale,
                draws=np.stack(draws) if draws else None,
                channels=None if channels is None else channels.numpy(),
                kept=kept,
                controls=controls,
                decode=(factor.numpy(), mean.numpy()) if whole and not self.models.low_memory else None,
                progress=request.progress,
            )
        )
        if made.dtype == np.uint8:
            return PipelineOutput([Image.fromarray(picture) for picture in made])
        return self._finish(torch.from_numpy(made), request)

    def _denoise(
        self,
        latents: torch.Tensor,
        timesteps: torch.Tensor,
        denoiser: Denoiser,
        request: Request,
        channels: torch.Tensor | None,
        kept: Kept | None,
    ) -> torch.Tensor:
        """The sampling loop on the host. With guidance the UNet sees 2B rows: negative, then positive."""
        scheduler, options = request.scheduler, _step_options(request)
        with step_bar(timesteps, request.progress) as bar:
            for index, timestep in enumerate(bar):
                sample = scheduler.scale_model_input(latents, timestep)
                if channels is not None:
                    sample = torch.cat([sample, channels], 1)
                if request.guidance is None:
                    noise = denoiser(index, sample)
                else:
                    noise = guided(denoiser(index, torch.cat([sample, sample])), request)
                latents = scheduler.step(noise, timestep, latents, **options).prev_sample
                if kept is not None:
                    latents = torch.from_numpy(kept.after_step(latents.numpy(), index))
                if request.callback_on_step_end is not None:
                    changed = request.callback_on_step_end(self, index, timestep, {"latents": latents}) or {}
                    latents = changed.get("latents", latents)
        return latents

    def _device_schedule(self, request: Request, timesteps: torch.Tensor) -> LinearSchedule | None:
        """What the loop on the device needs of the scheduler; None where the loop has to run on the host."""
        if not self.device_loop or request.callback_on_step_end is not None:
            return None
        if request.plan is not None:
            return request.plan.schedule
        try:
            return linear_schedule(request.scheduler, timesteps, eta=request.eta, draws=True)
        except InputError as error:
            warn_once(f"latents go through the host at every step: {error}")
            return None


def guided(noise: torch.Tensor, request: Request) -> torch.Tensor:
    """The prediction of 2B rows, negative first -> the guided one of B rows.

    `guidance_rescale` gives it back some of the positive prediction's deviation (Lin et al., 2023, section 3.4).
    """
    assert request.guidance is not None
    negative, positive = noise.chunk(2)
    made = negative + request.guidance * (positive - negative)
    if not request.guidance_rescale:
        return made
    axes = tuple(range(1, made.ndim))
    rescaled = made * (positive.std(axes, keepdim=True) / made.std(axes, keepdim=True))
    return request.guidance_rescale * rescaled + (1 - request.guidance_rescale) * made


def _step_options(request: Request) -> dict[str, Any]:
    """What this scheduler's step takes of `eta` (DDIM) and `generator` (ancestral and SDE schedulers)."""
    takes = inspect.signature(request.scheduler.step).parameters
    options = {"eta": request.eta, "generator": request.generator}
    return {name: value for name, value in options.items() if name in takes}
