"""From the first latents to the last, on the device or on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from sd_ort.checkpoints.conditioning import latent_scale
from sd_ort.checkpoints.schedule_cache import LinearSchedule
from sd_ort.core.errors import InputError
from sd_ort.pipelines.controlnet_inputs import Control
from sd_ort.pipelines.device.loop import DeviceLoop
from sd_ort.pipelines.output import PipelineOutput
from sd_ort.pipelines.request import Request
from sd_ort.pipelines.sampling_job import Drawing, Kept, Tokens, check_finite
from sd_ort.pipelines.text import Conditioning
from sd_ort.runtime.providers import warn_once

if TYPE_CHECKING:
    from sd_ort.pipelines.text import Texts
    from sd_ort.pipelines.vae import Vae
    from sd_ort.runtime.components import Components


class Sampling:
    """What draws, for a pipeline with these attributes, `_finish` and `_noise`."""

    models: Components
    texts: Texts
    vae: Vae
    loop: DeviceLoop
    device_loop: bool
    safety_checker: bool

    def _finish(self, latents: np.ndarray, request: Request) -> PipelineOutput:
        raise NotImplementedError

    def _noise(self, request: Request, given: Any = None) -> np.ndarray:
        raise NotImplementedError

    def _sample(
        self,
        latents: np.ndarray,
        timesteps: Any,
        conditioning: Conditioning | Tokens,
        request: Request,
        controls: Sequence[Control] = (),
        *,
        channels: np.ndarray | None = None,
        kept: Kept | None = None,
    ) -> PipelineOutput:
        """From the first latents to what the caller asked for. `timesteps`: the scheduler's, or a plan's.

        `channels` (B, C', h, w) go behind the latents' channels, unscaled: the mask and the masked picture of an
        inpainting UNet. `kept`: what every step leaves of a picture.
        """
        # A ControlNet on the device sees what the UNet sees: all rows, and no channels of a mask.
        alike = not controls or (channels is None and not request.guess_mode)
        schedule = self._device_schedule(request, timesteps) if alike else None
        if schedule is None:
            if self.models.partner is not None:
                warn_once("guidance is not split, and one device draws: latents go through the host at every step.")
            from sd_ort.pipelines import denoiser, host_loop  # torch, which the loop on the device does without

            arrays = _arrays(self.texts.condition(request) if isinstance(conditioning, Tokens) else conditioning)
            unet = denoiser.Denoiser(self.models, arrays | request.pictures, timesteps, controls)
            drawn = host_loop.denoise(self, latents, timesteps, unet, request, channels, kept)
            check_finite(drawn, "unet")
            return self._finish(drawn, request)
        if "controlnet" in self.models and not controls:
            raise InputError("this UNet was exported for a ControlNet: give a control_image (--control-image).")
        checked = self.safety_checker and "safety_checker" in self.models
        apart = checked or self.vae.use_tiling or self.vae.use_slicing or "vae_decoder" in self.models.elsewhere
        whole = request.output_type == "pil" and not apart
        mean, factor = latent_scale(self.vae.config)
        draws = [self._noise(request) for _ in range(schedule.draws)]
        made = self.loop.run(
            Drawing(
                latents,
                (conditioning.given if isinstance(conditioning, Tokens) else _arrays(conditioning)) | request.pictures,
                schedule,
                guidance=request.guidance,
                rescale=request.guidance_rescale,
                draws=np.stack(draws) if draws else None,
                channels=channels,
                kept=kept,
                controls=controls,
                decode=(factor, mean) if whole and not self.models.low_memory else None,
                progress=request.progress,
                texts=conditioning if isinstance(conditioning, Tokens) else None,
            )
        )
        if made.dtype == np.uint8:
            return PipelineOutput([Image.fromarray(picture) for picture in made])
        return self._finish(made, request)

    def _condition(self, request: Request) -> Conditioning | Tokens:
        """What the UNet is told about the prompts; tokens where text encoders run on the device too."""
        models = self.models
        here = self.device_loop and request.callback_on_step_end is None and models.partner is None
        if here and not models.low_memory and not {name for _, name in self.texts.encoders} & {*models.elsewhere}:
            tokens = self.texts.tokens(request)
            if tokens is not None:
                return tokens
        return self.texts.condition(request)

    def _device_schedule(self, request: Request, timesteps: Any) -> LinearSchedule | None:
        """What the loop on the device needs of the scheduler; None where the loop has to run on the host."""
        if not self.device_loop or request.callback_on_step_end is not None:
            return None
        if request.plan is not None:
            return request.plan.schedule
        from sd_ort.checkpoints.schedule import linear_schedule

        try:
            return linear_schedule(request.scheduler, timesteps, eta=request.eta, draws=True)
        except InputError as error:
            warn_once(f"latents go through the host at every step: {error}")
            return None


def _arrays(conditioning: Conditioning) -> dict[str, np.ndarray]:
    return {"encoder_hidden_states": conditioning.embeddings, **conditioning.added}
