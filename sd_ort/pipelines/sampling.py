"""From the first latents to the last, on the device or on the host."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from sd_ort.checkpoints.conditioning import latent_scale
from sd_ort.checkpoints.linear_schedule import LinearSchedule
from sd_ort.core.errors import InputError
from sd_ort.pipelines import host_loop
from sd_ort.pipelines.controlnet_inputs import ControlNetInput
from sd_ort.pipelines.output import PipelineOutput
from sd_ort.pipelines.request import Request
from sd_ort.pipelines.sampling_job import InpaintBlend, PromptTokens, SamplingJob, check_finite
from sd_ort.pipelines.state import PipelineState
from sd_ort.pipelines.text import Conditioning
from sd_ort.runtime.providers import warn_once

if TYPE_CHECKING:
    from sd_ort.pipelines.device.loop import DeviceLoop
    from sd_ort.pipelines.scheduler import Schedule


class SamplingMixin(PipelineState):
    """Runs the denoising loop, on the device or on the host."""

    @cached_property
    def loop(self) -> DeviceLoop:
        """The loop on the device; nothing is opened yet."""
        from sd_ort.pipelines.device.guidance_split import open_loop  # onnx, which the loop on the host does without

        return open_loop(self.models)

    def _finish(self, latents: np.ndarray, request: Request) -> PipelineOutput:
        raise NotImplementedError

    def _noise(self, request: Request, given: Any = None) -> np.ndarray:
        raise NotImplementedError

    def _controls(self, request: Request, steps: int) -> list[ControlNetInput]:
        raise NotImplementedError

    def _sample(
        self,
        latents: np.ndarray,
        schedule: Schedule,
        conditioning: Conditioning | PromptTokens,
        request: Request,
        *,
        channels: np.ndarray | None = None,
        kept: InpaintBlend | None = None,
    ) -> PipelineOutput:
        """From the first latents to what the caller asked for.

        `channels` (B, C', h, w) go behind the latents' channels, unscaled: the mask and the masked picture of an
        inpainting UNet. `kept`: what every step leaves of a picture.
        """
        controls = self._controls(request, len(schedule.timesteps))
        noise = [self._noise(request) for _ in range(getattr(schedule, "noise_count", 0))]
        # A ControlNet on the device sees what the UNet sees: all rows, and no channels of a mask.
        alike = not controls or (channels is None and not request.guess_mode)
        if not self._runs_on_device(request, schedule) or not alike:
            if self.models.guidance_peer is not None:
                warn_once("guidance is not split, and one device draws: latents go through the host at every step.")
            arrays = _arrays(self.texts.condition(request) if isinstance(conditioning, PromptTokens) else conditioning)
            unet = host_loop.Denoiser(self.models, arrays | request.pictures, np.asarray(schedule.timesteps), controls)
            drawn = host_loop.denoise(self, latents, schedule, noise, unet, request, channels, kept)
            check_finite(drawn, "unet")
            return self._finish(drawn, request)
        assert isinstance(schedule, LinearSchedule)
        if "controlnet" in self.models and not controls:
            raise InputError("this UNet was exported for a ControlNet: give a control_image (--control-image).")
        checked = self.safety_checker and "safety_checker" in self.models
        apart = checked or self.vae.use_tiling or self.vae.use_slicing or "vae_decoder" in self.models.placed
        whole = request.output_type == "pil" and not apart
        mean, factor = latent_scale(self.vae.config)
        made = self.loop.run(
            SamplingJob(
                latents,
                (conditioning.given if isinstance(conditioning, PromptTokens) else _arrays(conditioning))
                | request.pictures,
                schedule.shortened,
                guidance=request.guidance,
                rescale=request.guidance_rescale,
                draws=np.stack(noise) if noise else None,
                channels=channels,
                kept=kept,
                controls=controls,
                decode=(factor, mean) if whole and not self.models.low_memory else None,
                progress=request.progress,
                texts=conditioning if isinstance(conditioning, PromptTokens) else None,
            )
        )
        if made.dtype == np.uint8:
            return PipelineOutput([Image.fromarray(picture) for picture in made])
        return self._finish(made, request)

    def _condition(self, request: Request) -> Conditioning | PromptTokens:
        """What the UNet is told about the prompts; tokens where text encoders run on the device too."""
        models = self.models
        here = self.device_loop and request.callback_on_step_end is None and models.guidance_peer is None
        if here and not models.low_memory and not {name for _, name in self.texts.encoders} & {*models.placed}:
            tokens = self.texts.tokens(request)
            if tokens is not None:
                return tokens
        return self.texts.condition(request)

    def _runs_on_device(self, request: Request, schedule: Schedule) -> bool:
        """Whether the loop runs on the device; warns of a scheduler that only runs on the host."""
        if not self.device_loop or request.callback_on_step_end is not None:
            return False
        if not isinstance(schedule, LinearSchedule):
            warn_once(f"latents go through the host at every step: {schedule.reason}")
            return False
        return True


def _arrays(conditioning: Conditioning) -> dict[str, np.ndarray]:
    return {"encoder_hidden_states": conditioning.embeddings, **conditioning.added}
