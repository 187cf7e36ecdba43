"""Run a merged pipeline: one ONNX model, one session, for text to image (see `sd_ort.merge`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sd_ort.core.errors import InputError
from sd_ort.core.folder import MERGED
from sd_ort.family.conditioning import text_length, token_ids
from sd_ort.family.schedule import linear_schedule
from sd_ort.family.schedulers import set_timesteps
from sd_ort.pipeline.text_to_image import PipelineOutput, Request, StableDiffusionPipeline


class MergedPipeline(StableDiffusionPipeline):
    """Text to image with a folder written by `sd-ort merge`.

    Called as `StableDiffusionPipeline`, but without what would look into the loop: callbacks, eta, control images,
    latents as output. Both halves of guidance always run: at a `guidance_scale` of 1 or less, with a scale of 1.
    """

    NEEDS = (MERGED,)
    SEPARATE = False

    def _draw(self, request: Request, latents: Any, control_image: Any, control_scale: float) -> PipelineOutput:
        if request.callback is not None or request.eta or request.output_type == "latent" or control_image is not None:
            raise InputError("a merged model takes no callback, eta, control image or latent output: use its source.")
        model = self.models[MERGED]
        # Inputs with a default: ONNX Runtime lists them apart.
        model.inputs |= {value.name: value for value in model.session.get_overridable_initializers()}
        set_timesteps(request.scheduler, request.steps)
        scheduler = request.scheduler
        schedule = linear_schedule(scheduler, scheduler.timesteps, float(scheduler.init_noise_sigma))
        feed: dict[str, Any] = {
            "latents": self._noise(request, latents).numpy(),
            "timesteps": schedule.timesteps,
            "scales": schedule.scales,
            "weights": schedule.weights,
            "guidance_scale": np.array([request.guidance or 1.0], np.float32),
        }
        negatives = self._negatives(request.negative, len(request.prompts))
        for tokenizer, name in self.text_encoders:
            suffix, length = name.removeprefix("text_encoder"), text_length(self.folder, name, tokenizer)
            for kind, prompts in (("input", request.prompts), ("negative", negatives)):
                feed[f"{kind}_ids{suffix}"] = token_ids(tokenizer, prompts, length).repeat(request.images_per_prompt, 0)
        if self.is_xl:
            size = [request.height, request.width]
            feed["negative_strength"] = np.array([0.0 if self._zero_negative(request.negative) else 1.0], np.float32)
            feed["time_ids"] = np.array([[*size, 0, 0, *size]] * request.batch, np.float32)
        image = torch.from_numpy(model(**feed)["image"])
        return PipelineOutput(self.image_processor.postprocess(image * 2 - 1, request.output_type))
