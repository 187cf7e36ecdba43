"""State of one call of a diffusion transformer: its latents before a step, and all that its steps read."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sd_ort.checkpoints import flow_match
from sd_ort.core.pipeline_folder import HOISTED
from sd_ort.pipelines.images import as_array
from sd_ort.pipelines.transformer_steps import TransformerSteps
from sd_ort.runtime.components import Components
from sd_ort.runtime.session import OrtModel

# Tensors of a prompt by diffusers' names -> inputs of the transformer.
PROMPT_TENSORS = {"prompt_embeds": "encoder_hidden_states", "pooled_prompt_embeds": "pooled_projections"}


@dataclass(frozen=True)
class SkipLayerGuidance:
    """Guidance away from the prediction of a transformer without some of its blocks, in a range of the steps.

    Attributes:
        blocks: Indices of the blocks.
        scale: Factor of the difference to the prediction for the prompt.
        start, stop: Shares of the steps between which it is used.
        inputs: Inputs of the transformer that depend on the prompt, without the negative prompt.
    """

    blocks: tuple[int, ...]
    scale: float
    start: float
    stop: float
    inputs: dict[str, np.ndarray]

    def steps(self, models: Components, timesteps: np.ndarray) -> TransformerSteps:
        """Return the calls of the transformer without the blocks, which has a session of its own."""
        parts = HOISTED["transformer"]
        part = parts["time" if parts["time"] in models else "step"]
        label = f"without blocks {', '.join(map(str, self.blocks))}"
        edited = models.variant(part, label, partial(_skip_blocks, models.folder, self.blocks))
        return TransformerSteps(ChainMap({part: edited}, models), [self.inputs], timesteps)


def _skip_blocks(folder: Path, blocks: Sequence[int], path: Path) -> bytes:
    from sd_ort.graphs.load import load, serialize_over_data
    from sd_ort.graphs.skip_blocks import skip_blocks
    from sd_ort.weights.recipes import read_recipes

    model = load(path)
    skip_blocks(model, read_recipes(folder).get("transformer", {}), blocks)
    return serialize_over_data(model, path.parent)


@dataclass
class Denoising:
    """The latents of one call before its first step, and all that its steps read.

    Attributes:
        sample: Latents as the transformer reads them.
        schedule: Timesteps and sigmas.
        prompts: Inputs of the transformer that depend on the prompt; then, with guidance in calls of their own, those
            of the negative prompt.
        fixed: The other inputs of the transformer that are the same in each step.
        timestep_scale: Factor of the schedule's timesteps in the transformer's input.
        guidance_scale: Scale of classifier-free guidance; None without guidance.
        one_call: Whether rows of the negative prompt precede those of the prompt in one call.
        blend: Restores the region outside of a mask; None without one.
        references: Tokens (B, R, C) of reference images, which follow the latents; None without any.
        tensors: Other tensors that a callback may read, by name.
        skip_layers: Skip-layer guidance; None without it.
    """

    sample: np.ndarray
    schedule: flow_match.FlowMatchSchedule
    prompts: list[dict[str, np.ndarray]]
    fixed: dict[str, np.ndarray] = field(default_factory=dict)
    timestep_scale: float = 1.0
    guidance_scale: float | None = None
    one_call: bool = False
    blend: flow_match.InpaintBlend | None = None
    references: np.ndarray | None = None
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    skip_layers: SkipLayerGuidance | None = None

    def steps(self, models: Mapping[str, OrtModel]) -> TransformerSteps:
        """Return the transformer's calls for the prompts as these are now."""
        timesteps = self.schedule.timesteps * np.float32(self.timestep_scale)
        return TransformerSteps(models, [{**prompt, **self.fixed} for prompt in self.prompts], timesteps)

    def hidden_states(self) -> np.ndarray:
        """Return the latents as a call of the transformer reads them."""
        sample = self.sample if self.references is None else np.concatenate([self.sample, self.references], 1)
        return np.concatenate([sample, sample]) if self.one_call else sample

    def of_sample(self, predictions: list[np.ndarray]) -> list[np.ndarray]:
        """Return predictions without the tokens of reference images."""
        return predictions if self.references is None else [each[:, : self.sample.shape[1]] for each in predictions]

    def guided(self, predictions: list[np.ndarray]) -> np.ndarray:
        """Return the prediction of a step from the outputs of its calls."""
        predictions = self.of_sample(predictions)
        if self.guidance_scale is None:
            return predictions[0]
        negative, positive = np.split(predictions[0], 2) if self.one_call else predictions[::-1]
        return negative + np.float32(self.guidance_scale) * (positive - negative)

    def guided_without_blocks(
        self, i: int, prediction: np.ndarray, predictions: list[np.ndarray], without: TransformerSteps
    ) -> np.ndarray:
        """Return the prediction of step i with skip-layer guidance. `predictions`: of the full transformer."""
        assert self.skip_layers is not None
        (skipped,) = without(i, self.sample)
        return prediction + np.float32(self.skip_layers.scale) * (np.split(predictions[0], 2)[1] - skipped)

    def callback_tensors(self) -> dict[str, Any]:
        """Return what a callback may read, by diffusers' names: arrays, or lists of these."""
        prompt = self.prompts[0]
        values = {name: prompt[key] for name, key in PROMPT_TENSORS.items() if key in prompt}
        return {**values, **self.tensors, "latents": self.sample}

    def replace(self, changed: Mapping[str, Any]) -> bool:
        """Take the tensors that a callback returned; return whether prompt embeddings are among them."""
        if "latents" in changed:
            self.sample = as_array(changed["latents"])
        replaced = {key: as_array(changed[name]) for name, key in PROMPT_TENSORS.items() if name in changed}
        self.prompts[0] |= {key: array for key, array in replaced.items() if key in self.prompts[0]}
        return bool(replaced)

    def step(self, i: int, prediction: np.ndarray) -> None:
        """Replace the latents by those after step i."""
        self.sample = self.schedule.step(i, prediction, self.sample)
        if self.blend is not None:
            self.sample = self.blend.apply(self.schedule, i, self.sample)
