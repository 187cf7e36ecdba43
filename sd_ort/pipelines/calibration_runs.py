"""Run a pipeline and record the inputs of its components, for the calibration of 8-bit activations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from sd_ort.checkpoints.generation_defaults import generation_defaults
from sd_ort.core.errors import InputError
from sd_ort.pipelines.families import AutoPipelineForText2Image
from sd_ort.pipelines.sampling_job import NotFiniteError
from sd_ort.runtime.session import OrtModel

MAX_STEPS = 20  # denoising steps of a prompt: more give no other activations
STEPS_PER_PROMPT = 4  # recorded steps; those of consecutive prompts are consecutive, so that all steps occur
DECODER_STRIDE = 4  # every so many prompts, the decoder's input is recorded: an image has many more pixels than latents


class RecordingModel(OrtModel):
    """A component that keeps the inputs of every `stride`-th call, from call `offset` on."""

    def __init__(self, model: OrtModel) -> None:
        super().__init__(model.session, model.lock)
        self.runs: list[dict[str, np.ndarray]] = []
        self.stride, self.calls = 1, 0

    def start(self, stride: int, offset: int) -> None:
        """Start a prompt."""
        self.stride, self.calls = stride, -(offset % stride)

    def __call__(self, **arrays: Any) -> dict[str, np.ndarray]:
        """Run once, see `OrtModel`."""
        if self.calls % self.stride == 0:
            self.runs.append({name: np.array(array, self.dtype(name)) for name, array in arrays.items()})
        self.calls += 1
        return super().__call__(**arrays)


def record_runs(
    folder: Path, prompts: Sequence[str], output: Path, *, vae_decoder: bool = False, show_progress: bool = True
) -> int:
    """Generate latents of `prompts` on the CPU and write inputs of the denoiser to the .npz `output`.

    Prompt i has seed i. Arrays are named as `checkpoints.recorded_inputs` reads them. Returns the number of runs.

    Args:
        folder: A pipeline folder in float32 that is not hoisted.
        vae_decoder: Whether every `DECODER_STRIDE`-th prompt is decoded, and the decoder's input written too.

    Raises:
        InputError: The latents of a prompt are not finite.
    """
    pipeline = AutoPipelineForText2Image.from_pretrained(folder, "cpu")
    component = "unet" if "unet" in pipeline.models else "transformer"
    recorded = [component, "vae_decoder"] if vae_decoder else [component]
    models = {name: RecordingModel(pipeline.models[name]) for name in recorded}
    for name, model in models.items():
        pipeline.models[name] = model
    defaults = generation_defaults(folder)
    steps = min(defaults.steps, MAX_STEPS)
    stride = math.ceil(steps / STEPS_PER_PROMPT)
    for seed, prompt in enumerate(tqdm(prompts, unit="prompt", desc="calibration", disable=not show_progress)):
        models[component].start(stride, seed)
        is_decoded = vae_decoder and seed % DECODER_STRIDE == 0
        try:
            with np.errstate(all="ignore"):  # the guidance of an infinite prediction
                pipeline(
                    prompt,
                    num_inference_steps=steps,
                    guidance_scale=defaults.guidance,
                    generator=seed,
                    output_type="np" if is_decoded else "latent",
                    progress=False,
                )
        except NotFiniteError as error:
            raise InputError(
                f"prompt {prompt!r} gives latents that are not finite: leave it out of the calibration."
            ) from error
    runs = {
        f"{component}/{name}/{i}": array
        for component, model in models.items()
        for i, run in enumerate(model.runs)
        for name, array in run.items()
    }
    np.savez(output, **runs)  # type: ignore[arg-type]
    return sum(len(model.runs) for model in models.values())
