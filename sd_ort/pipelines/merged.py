"""Run a merged pipeline: one ONNX model, one session, for text to image (see `sd_ort.optimize.merge`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from sd_ort.checkpoints.conditioning import text_length, token_ids
from sd_ort.checkpoints.generation_defaults import generation_defaults
from sd_ort.checkpoints.linear_schedule import fixed_schedule
from sd_ort.core.errors import InputError
from sd_ort.core.pipeline_folder import MERGED
from sd_ort.pipelines.images import to_output_type
from sd_ort.pipelines.output import PipelineOutput
from sd_ort.pipelines.request import Prompt, Request
from sd_ort.pipelines.text_to_image import StableDiffusionPipeline

# Arguments of a call that it takes; the others would look into the loop, or change the text.
SUPPORTED_ARGUMENTS = {
    "prompt", "negative_prompt", "height", "width", "num_images_per_prompt", "num_inference_steps", "timesteps",
    "sigmas", "guidance_scale", "generator", "latents", "output_type", "return_dict", "progress",
}  # fmt: skip


class MergedPipeline(StableDiffusionPipeline):
    """Text to image with a folder written by `sd-ort merge`.

    Called as `StableDiffusionPipeline`, but without what would look into the loop: callbacks, eta, control images,
    latents as output. Both halves of guidance always run: at a `guidance_scale` of 1 or less, with a scale of 1.
    """

    REQUIRED_COMPONENTS = (MERGED,)
    HAS_SEPARATE_COMPONENTS = False

    def __call__(  # type: ignore[override]
        self,
        prompt: Prompt | None = None,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Generate images. Number of steps and guidance scale: by default those that the model was merged with."""
        return self._generate(locals())

    @property
    def _defaults(self) -> Mapping[str, Any]:
        steps, guidance = generation_defaults(self.folder)
        return {"num_inference_steps": steps, "guidance_scale": guidance}

    def load_textual_inversion(self, *_: Any, **__: Any) -> None:
        """Raises InputError: the table of words lies in the model."""
        raise InputError("a merged model learns no words: load them with the folder it was made from.")

    def _lora_manager(self) -> NoReturn:
        """Raises InputError: the manifest of a merged model has no weight recipes."""
        raise InputError("a merged model takes no LoRAs: load them with the folder it was made from.")

    def _run_request(self, request: Request) -> PipelineOutput:
        options = {
            "latent output": request.output_type == "latent",
            "vae_tiling": self.vae.use_tiling,
            "vae_slicing": self.vae.use_slicing,
        }
        foreign = sorted(request.non_default_arguments() - SUPPORTED_ARGUMENTS)
        foreign += [name for name, is_set in options.items() if is_set]
        if foreign:
            raise InputError(f"a merged model takes no {', '.join(foreign)}: use the folder it was made from.")
        model = self.models[MERGED]
        # Inputs with a default: ONNX Runtime lists them apart.
        model.inputs |= {value.name: value for value in model.session.get_overridable_initializers()}
        schedule = fixed_schedule(request.timetable)
        feed: dict[str, Any] = {
            "latents": self._noise(request, request.latents),
            "timesteps": schedule.timesteps,
            "scales": schedule.input_scales,
            "weights": schedule.weights,
            "guidance_scale": np.array([request.guidance or 1.0], np.float32),
        }
        texts = {"input": request.prompts, "negative": request.per_prompt(request.negative_prompt)}
        for tokenizer, name in self.texts.encoders:
            suffix, length = name.removeprefix("text_encoder"), text_length(self.folder, name, tokenizer)
            for kind, prompts in texts.items():
                ids = token_ids(tokenizer, prompts, length)
                feed[f"{kind}_ids{suffix}"] = ids.repeat(request.num_images_per_prompt, 0)
        if self.is_sdxl:
            size = list(request.size)
            feed["negative_strength"] = np.array([0.0 if self.texts.zero_negative(request) else 1.0], np.float32)
            feed["time_ids"] = np.array([[*size, 0, 0, *size]] * request.batch, np.float32)
        return PipelineOutput(to_output_type(model(**feed)["image"] * 2 - 1, request.output_type))
