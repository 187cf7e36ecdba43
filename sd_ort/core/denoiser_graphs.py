"""The wiring of a UNet or a diffusion transformer: one graph, or the three graphs of a hoisted one."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from sd_ort.core.errors import InputError
from sd_ort.core.pipeline_folder import HOISTED

T = TypeVar("T")


class DenoiserGraphs(Generic[T]):
    """The graphs of a denoiser, in the order in which they run, and the tensors that each one reads by name.

        conditioning                              -> prompt graph   once for a prompt
        conditioning, prompt's outputs, timestep  -> time graph     once for a schedule, or in each step
        all of these, latents                     -> step graph     in each step

    A denoiser that is not hoisted is its step graph alone. A tensor is whatever `run` takes: an array, a torch tensor,
    a buffer on a device, or a value of a graph that the others are inlined into.
    """

    def __init__(
        self,
        component: str,
        present: Container[str],
        inputs: Callable[[str], Iterable[str]],
        run: Callable[[str, dict[str, T]], Mapping[str, T]],
    ) -> None:
        """Run nothing yet.

        Args:
            component: "unet" or "transformer".
            present: Names of the folder's components.
            inputs: Returns the names of a component's inputs.
            run: Runs a component with its inputs by name, and returns its outputs by name.
        """
        self.parts, self._inputs, self._run = HOISTED[component], inputs, run
        self.is_hoisted = self.parts["prompt"] in present

    def input_names(self) -> set[str]:
        parts = self.parts.values() if self.is_hoisted else [self.parts["step"]]
        return {name for part in parts for name in self._inputs(part)}

    def feed(self, part: str, available: Mapping[str, T]) -> dict[str, T]:
        """Return the inputs of the graph `part`: "prompt", "time" or "step". Raises InputError if one is missing."""
        names = list(self._inputs(self.parts[part]))
        if missing := [name for name in names if name not in available]:
            raise InputError(
                f"the {self.parts['step']} needs {', '.join(missing)}, which this pipeline does not provide."
            )
        return {name: available[name] for name in names}

    def prompt_outputs(self, conditioning: Mapping[str, T]) -> Mapping[str, T]:
        """Return the outputs of the prompt graph; nothing unless the denoiser is hoisted."""
        return self._run(self.parts["prompt"], self.feed("prompt", conditioning)) if self.is_hoisted else {}

    def time_outputs(
        self, tensors: Mapping[str, T], timestep: T, repeat: Callable[[dict[str, T]], Mapping[str, T]] = dict
    ) -> Mapping[str, T]:
        """Return the outputs of the time graph; nothing unless the denoiser is hoisted.

        Args:
            known: Conditioning and outputs of the prompt graph.
            timestep: The timestep of each row, of one step or of several, one after the other.
            repeat: Returns tensors with their rows repeated for every one of these steps.
        """
        if not self.is_hoisted:
            return {}
        feed = self.feed("time", {**tensors, "timestep": timestep})
        rest = {name: value for name, value in feed.items() if name != "timestep"}
        return self._run(self.parts["time"], {**repeat(rest), "timestep": feed["timestep"]})

    def step_tensors(self, conditioning: Mapping[str, T], timestep: T) -> dict[str, T]:
        """Return the conditioning of one step and the outputs of the other two graphs. timestep: one value per row."""
        tensors = {**conditioning, **self.prompt_outputs(conditioning)}
        return {**tensors, **self.time_outputs(tensors, timestep)}


class ArrayModel(Protocol):
    """Protocol of a component as a function of NumPy arrays. inputs: specs by name."""

    @property
    def inputs(self) -> Mapping[str, Any]: ...

    def __call__(self, **arrays: Any) -> Mapping[str, np.ndarray]: ...


class ArrayDenoiserGraphs(DenoiserGraphs[np.ndarray]):
    """The graphs of a denoiser as functions of NumPy arrays."""

    def __init__(self, component: str, models: Mapping[str, ArrayModel]) -> None:
        """Run nothing yet. `models`: the folder's components by name."""
        super().__init__(component, models, lambda name: models[name].inputs, lambda name, feed: models[name](**feed))

    def steps_outputs(
        self, tensors: Mapping[str, np.ndarray], timesteps: np.ndarray, rows: int
    ) -> dict[str, np.ndarray]:
        """Return the outputs (T, rows, ...) of the time graph for the steps `timesteps` (T,), computed in one call."""
        steps = len(timesteps)

        def repeat(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            return {name: np.concatenate([array] * steps) for name, array in arrays.items()}

        outputs = self.time_outputs(tensors, np.repeat(timesteps, rows), repeat)
        return {name: value.reshape(steps, rows, *value.shape[1:]) for name, value in outputs.items()}
