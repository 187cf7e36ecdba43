"""Mixin that runs the sampling loop, on the device if it can, else on the host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sd_ort.checkpoints.conditioning import latent_scale
from sd_ort.checkpoints.linear_schedule import LinearSchedule
from sd_ort.core.errors import InputError
from sd_ort.pipelines import host_loop, patches
from sd_ort.pipelines.controlnet_inputs import ControlNetInput
from sd_ort.pipelines.images import pil_images
from sd_ort.pipelines.output import PipelineOutput
from sd_ort.pipelines.request import Request
from sd_ort.pipelines.sampling_job import InpaintBlend, PromptTokens, SamplingJob, check_finite
from sd_ort.pipelines.step_cache import Edit, StepCacheMixin
from sd_ort.pipelines.text import Conditioning
from sd_ort.runtime.providers import warn_once
from sd_ort.weights.recipes import read_recipes

if TYPE_CHECKING:
    import onnx_ir as ir

    from sd_ort.pipelines.device.loop import DeviceLoop
    from sd_ort.pipelines.scheduler import PipelineScheduler, Schedule


class SamplingMixin(StepCacheMixin):
    """Runs the sampling loop, on the device or on the host."""

    _scheduler: PipelineScheduler

    @cached_property
    def loop(self) -> DeviceLoop:
        """The loop on one device, on two for the halves of guidance, or on several for bands of rows."""
        # Imported here: onnx, which the loop on the host does without, and onnx_ir, which only bands of rows need.
        if self.models.placement.splits_image:
            from sd_ort.pipelines.device.patches import SplitImageLoop

            return SplitImageLoop(self.models)
        from sd_ort.pipelines.device.guidance_split import SplitGuidanceLoop
        from sd_ort.pipelines.device.loop import DeviceLoop

        peers = self.models.placement.peers
        return SplitGuidanceLoop(self.models, peers[0]) if peers else DeviceLoop(self.models)

    def _finish(self, latents: np.ndarray, request: Request) -> PipelineOutput:
        raise NotImplementedError

    def _noise(self, request: Request, latents: Any = None) -> np.ndarray:
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
        blend: InpaintBlend | None = None,
    ) -> PipelineOutput:
        """Return the output of a call for its first latents.

        `channels` (B, C', h, w): unscaled channels behind those of the latents, the mask and the masked image of an
        inpainting UNet. `blend`: applied after every step.
        """
        controls = self._controls(request, len(schedule.timesteps))
        noise = [self._noise(request) for _ in range(getattr(schedule, "noise_count", 0))]
        # A ControlNet on the device reads the UNet's sample: all rows, and no channels of a mask.
        same_sample = not controls or (channels is None and not request.guess_mode)
        if not self._runs_on_device(request, schedule) or not same_sample or not request.unet_on_device:
            if self.models.placement.splits_image:
                raise InputError(
                    "split_image runs in the loop on the devices: take a scheduler without callbacks that runs there."
                )
            if self.models.placement.peers:
                warn_once("guidance is not split, and one device draws: latents go through the host at every step.")
            arrays = _arrays(self.texts.condition(request) if isinstance(conditioning, PromptTokens) else conditioning)
            arrays |= request.adapter_images
            perturbed = request.batch if request.is_perturbed else 0
            if perturbed:
                arrays = {name: np.concatenate([value, value[-perturbed:]]) for name, value in arrays.items()}
            timesteps = np.asarray(schedule.timesteps)
            unet = host_loop.Denoiser(
                self.models, arrays, timesteps, controls, request.unet, perturbed, request.shallow_steps
            )
            result = host_loop.denoise(self, latents, schedule, noise, unet, request, channels, blend)
            check_finite(result, "unet")
            return self._finish(result, request)
        assert isinstance(schedule, LinearSchedule)
        if "controlnet" in self.models and not controls:
            raise InputError("this UNet was exported for a ControlNet: give a control_image (--control-image).")
        has_checker = self.safety_checker and "safety_checker" in self.models
        separate_vae = (
            has_checker or self.vae.use_tiling or self.vae.use_slicing or "vae_decoder" in self.models.placement.placed
        )
        decodes = request.output_type in ("pil", "uint8") and not separate_vae
        mean, factor = latent_scale(self.vae.config)
        result = self.loop.run(
            SamplingJob(
                latents,
                (conditioning.conditioning if isinstance(conditioning, PromptTokens) else _arrays(conditioning))
                | request.adapter_images,
                schedule.shortened,
                guidance=request.guidance,
                rescale=request.guidance_rescale,
                noise_samples=np.stack(noise) if noise else None,
                channels=channels,
                blend=blend,
                controls=controls,
                decode=(factor, mean) if decodes and not self.models.low_memory else None,
                fits=lambda: self.vae.fits(latents.shape),
                progress=request.progress,
                texts=conditioning if isinstance(conditioning, PromptTokens) else None,
                unet=request.unet,
                shallow_steps=request.shallow_steps,
            )
        )
        if result.dtype == np.uint8:
            return PipelineOutput(result if request.output_type == "uint8" else pil_images(result))
        return self._finish(result, request)

    def _prepare_unet(self, request: Request) -> None:
        """Choose the UNet of a call: the folder's, or an edited graph, which runs in the host loop.

        Edits are for perturbed attention, sizes that do not halve evenly, and shallow steps. Raises InputError if the
        graph cannot be edited, or if a call has too few steps for shallow ones.
        """
        edits: list[tuple[str, Edit]] = []
        if any(side % self.size_multiple for side in request.size) and self.HAS_SEPARATE_COMPONENTS:
            edits.append(ODD_SIZES)
        if request.is_perturbed:
            layers = ", ".join(self.pag_applied_layers)
            edits.append((f"PAG in {layers}", partial(_perturb_attention, self.folder, self.pag_applied_layers)))
        # the graphs of full and shallow steps alone run on the device as the UNet does
        request.unet_on_device = not edits and (self.step_cache is None or not self.models.placement.peers)
        if self.step_cache is not None:
            self.step_cache.check(request, self._scheduler.name)
            request.shallow_steps = self._shallow_steps([*edits])
            edits.append((self.step_cache.label, self.step_cache.return_features))
        if self.models.placement.splits_image:
            patches.check(request, self._scheduler.name, self.models, self.size_multiple, [name for name, _ in edits])
        if not edits:
            return
        request.unet = self._edit_unet(edits, captured=len(edits) == 1 and self.step_cache is not None)
        request.unet_on_device |= request.unet == "unet"
        if self.device_loop and not request.unet_on_device:
            vars(self).pop("loop", None)  # which holds the UNet's session
            warn_once(f"latents go through the host at every step: the UNet's graph is another for {request.unet[5:]}.")

    def _condition(self, request: Request) -> Conditioning | PromptTokens:
        """Return the conditioning of the prompts, or their tokens if the text encoders run on the device, too."""
        models = self.models
        on_device = self.device_loop and request.callback_on_step_end is None and not models.placement.peers
        if (
            on_device
            and not models.low_memory
            and not {name for _, name in self.texts.encoders} & {*models.placement.placed}
        ):
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


def _crop_upsampling(model: ir.Model, size_multiple: int) -> bool:
    from sd_ort.graphs.unet import crop_upsampling, requires_even_sizes

    if not requires_even_sizes(model):
        return False
    try:
        crop_upsampling(model)
    except InputError as error:
        raise InputError(f"height and width must be multiples of {size_multiple}: {error}") from error
    return True


ODD_SIZES: tuple[str, Edit] = ("odd sizes", _crop_upsampling)  # of a UNet, for sizes that do not halve evenly


def _perturb_attention(folder: Path, patterns: Sequence[str], model: ir.Model, _: int) -> bool:
    from sd_ort.graphs.perturbed_attention import perturb_attention, self_attention_layers

    recipes = read_recipes(folder).get("unet", {})
    perturb_attention(model, recipes, self_attention_layers(recipes, patterns))
    return True


def _arrays(conditioning: Conditioning) -> dict[str, np.ndarray]:
    return {"encoder_hidden_states": conditioning.embeddings, **conditioning.added}
