"""Transformer calls of the denoising steps; hoisted graphs run once for all steps.

In a hoisted folder these are the prompt's graph, and the time graph for many steps in one call. A
captured transformer reads inputs that the steps share from device memory, to which they are copied once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from sd_ort.core.denoiser_graphs import ArrayDenoiserGraphs
from sd_ort.runtime.session import OrtModel

TIME_ROWS = 64  # batch rows of the time graph in one call: FLUX.1 has 4 MB of modulation for each


class TransformerSteps:
    """Predictions of a folder's transformer for the prompts and the schedule of one call, hoisted or not.

    Args:
        models: Components by name.
        prompts: For each call of the transformer in a step its inputs beside latents and timestep, by name.
        timesteps: The transformer's timestep of each step (T,), float32.
    """

    def __init__(
        self, models: Mapping[str, OrtModel], prompts: Sequence[Mapping[str, np.ndarray]], timesteps: np.ndarray
    ) -> None:
        self.models, self.timesteps = models, timesteps
        self.rows = len(prompts[0]["encoder_hidden_states"])
        self.shared: list[dict[str, np.ndarray]] = []  # of `prompts`, inputs of the step graph
        self.first, self.steps = 0, 0  # steps whose modulation is in `by_step`
        self.by_step: list[dict[str, np.ndarray]] = []  # of `prompts`, outputs (steps, rows, ...) of the time graph
        self.graphs = ArrayDenoiserGraphs("transformer", models)
        self.is_hoisted = self.graphs.is_hoisted
        self.prompts = [{**each, **self.graphs.prompt_outputs(each)} for each in prompts]

    def __call__(self, i: int, hidden_states: np.ndarray) -> list[np.ndarray]:
        """Return the prediction of each call in step i, float32. hidden_states: the latents, a row for each prompt."""
        changing = self._changing(i)
        model = self.models["transformer"]
        if not self.shared:
            names = [name for name in model.inputs if name != "hidden_states" and name not in changing[0]]
            keep = names if self.is_hoisted else list(self.prompts[0])  # a name that the graph lacks is rejected
            self.shared = [{name: prompt[name] for name in keep} for prompt in self.prompts]
        calls = zip(self.shared, changing, strict=True)
        outputs = [model.run_with_shared(shared, hidden_states=hidden_states, **inputs) for shared, inputs in calls]
        return [each["out_hidden_states"].astype(np.float32) for each in outputs]

    def _changing(self, i: int) -> list[dict[str, np.ndarray]]:
        """Return the inputs of each call that change with the step, beside the latents."""
        if not self.is_hoisted:
            return [{"timestep": self.timesteps[i : i + 1]} for _ in self.prompts]
        if not self.first <= i < self.first + self.steps:
            timesteps = self.timesteps[i : i + max(1, TIME_ROWS // self.rows)]
            self.first, self.steps = i, len(timesteps)
            self.by_step = [self.graphs.steps_outputs(prompt, timesteps, self.rows) for prompt in self.prompts]
        return [{name: value[i - self.first] for name, value in each.items()} for each in self.by_step]


StepGroup = tuple[list[int], dict[str, np.ndarray]]  # images, and the transformer's inputs for them


class GroupedSteps:
    """Predictions for prompts that are no one batch, in a call of the transformer for each group of images."""

    def __init__(self, models: Mapping[str, OrtModel], groups: Iterable[StepGroup], timesteps: np.ndarray) -> None:
        """The arguments are those of `TransformerSteps`, the prompts in groups."""
        self.groups = [(rows, TransformerSteps(models, [inputs], timesteps)) for rows, inputs in groups]

    def __call__(self, i: int, hidden_states: np.ndarray) -> np.ndarray:
        """Return the prediction of step i for patches (B, S, C), of the same shape, float32."""
        prediction = np.empty_like(hidden_states)
        for rows, steps in self.groups:
            prediction[rows] = steps(i, np.ascontiguousarray(hidden_states[rows]))[0]
        return prediction
