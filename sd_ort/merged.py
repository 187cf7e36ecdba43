"""Run a merged pipeline: one ONNX model, one session, for text to image (see `sd_ort.merge`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sd_ort.errors import InputError
from sd_ort.pipeline import (
    Generator,
    PipelineOutput,
    Prompt,
    StableDiffusionPipeline,
    StepCallback,
    text_length,
    token_ids,
)
from sd_ort.schedule import linear_schedule

COMPONENT = "pipeline"


class MergedPipeline(StableDiffusionPipeline):
    """Text to image with a folder written by `sd-ort merge`."""

    NEEDS = (COMPONENT,)
    SEPARATE = False

    def __call__(
        self,
        prompt: Prompt,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 50,
        guidance_scale: float = 7.5,
        negative_prompt: Prompt | None = None,
        num_images_per_prompt: int = 1,
        eta: float = 0.0,
        generator: Generator = None,
        latents: torch.Tensor | np.ndarray | None = None,
        output_type: str = "pil",
        callback_on_step_end: StepCallback | None = None,
        progress: bool = True,
        control_image: Any = None,
        controlnet_conditioning_scale: float = 1.0,
    ) -> PipelineOutput:
        """As `StableDiffusionPipeline`, but for what would look into the loop: callbacks, eta, latents as output.

        Both halves of guidance always run: at a `guidance_scale` of 1 or less, with a scale of 1.
        """
        if callback_on_step_end is not None or eta or output_type == "latent" or control_image is not None:
            raise InputError("a merged model takes no callback, eta, control image or latent output: use its source.")
        request = self._request(
            prompt,
            negative_prompt,
            (height or self.default_size, width or self.default_size),
            num_inference_steps,
            guidance_scale,
            num_images_per_prompt,
            eta,
            generator,
            output_type,
            None,
            progress,
        )
        model = self.models[COMPONENT]
        # Inputs with a default: ONNX Runtime lists them apart.
        model.inputs |= {value.name: value for value in model.session.get_overridable_initializers()}
        self.scheduler.set_timesteps(request.steps)
        schedule = linear_schedule(self.scheduler, self.scheduler.timesteps, float(self.scheduler.init_noise_sigma))
        feed: dict[str, Any] = {
            "latents": self._noise(request, latents).numpy(),
            "timesteps": schedule.timesteps,
            "scales": schedule.scales,
            "weights": schedule.weights,
            "guidance_scale": np.array([request.guidance or 1.0], np.float32),
        }
        negatives = self._negatives(negative_prompt, len(request.prompts))
        for tokenizer, name in self.text_encoders:
            suffix, length = name.removeprefix("text_encoder"), text_length(self.folder, name, tokenizer)
            for kind, prompts in (("input", request.prompts), ("negative", negatives)):
                feed[f"{kind}_ids{suffix}"] = token_ids(tokenizer, prompts, length).repeat(request.images_a_prompt, 0)
        if self.is_xl:
            size = [request.height, request.width]
            feed["negative_strength"] = np.array([0.0 if self._zero_negative(negative_prompt) else 1.0], np.float32)
            feed["time_ids"] = np.array([[*size, 0, 0, *size]] * request.batch, np.float32)
        image = torch.from_numpy(model(**feed)["image"])
        return PipelineOutput(self.image_processor.postprocess(image * 2 - 1, request.output_type))
