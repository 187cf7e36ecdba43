"""Runner of a folder's UNet or diffusion transformer for applications: hoisted or not."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from sd_ort.core.denoiser_graphs import DenoiserGraphs
from sd_ort.core.errors import InputError
from sd_ort.integrations.models import TorchComponentSessions
from sd_ort.integrations.tensors import Tensors


class DenoiserRunner:
    """Computes a denoiser's prediction in each step, and the prompt graph of a hoisted one once per prompt.

    `component`: "unet" or "transformer".
    """

    def __init__(self, models: TorchComponentSessions, component: str) -> None:
        self.models, self.component = models, component
        self.graphs = DenoiserGraphs(component, models, models.inputs, self._run_reusing_outputs)
        self.prompt: Mapping[str, torch.Tensor] = {}
        self.conditioning: Sequence[torch.Tensor] = ()
        self.prompt_cache_key: tuple[Any, ...] | None = None
        self.seconds: deque[float] = deque(maxlen=100)  # host time of the last calls; on a GPU until they are enqueued

    def predict(
        self,
        sample: Mapping[str, torch.Tensor],
        timestep: torch.Tensor | float,
        conditioning: Mapping[str, torch.Tensor],
        key: Hashable = None,
    ) -> torch.Tensor:
        """Return the prediction in the dtype and on the device of the latents.

        Args:
            sample: inputs by name that change in each step: first the latents, then ControlNet residuals.
            timestep: a scalar, or equal timesteps (B,).
            conditioning: the other inputs by name. Those that the graph does not have are ignored.
            key: cache key of `conditioning`: equal keys mean equal tensors. Without, the tensors are compared.

        Raises:
            InputError: if an input of the graph is missing, or the timesteps differ.
        """
        started = time.perf_counter()
        models, latents = self.models, next(iter(sample.values()))
        timesteps = torch.as_tensor(timestep, dtype=torch.float32).reshape(-1)
        if timesteps.device.type == "cpu" and len(timesteps) > 1 and not bool((timesteps == timesteps[0]).all()):
            raise InputError("the batch has different timesteps: this graph has one timestep for the batch.")
        prompt = self._prompt_outputs(conditioning, key)
        graph = self._step_graph(latents)
        rows = timesteps if len(timesteps) == len(latents) else timesteps[:1].expand(len(latents))
        computed = {**prompt, **self.graphs.time_outputs({**conditioning, **prompt}, rows)}
        feed = {**sample, **conditioning, **computed}
        step = models.models[graph]
        if "timestep" in step.inputs:
            feed["timestep"] = timesteps[:1].reshape((1,) * len(step.inputs["timestep"].shape))
        inputs = self.graphs.feed("step", feed)
        zero_copy_inputs = {name: inputs.pop(name) for name in computed.keys() & inputs.keys()}
        (out,) = models.call(graph, inputs, zero_copy_inputs).values()
        self.seconds.append(time.perf_counter() - started)
        return out.to(latents.device, latents.dtype)

    def _step_graph(self, latents: torch.Tensor) -> str:
        """Return the key of the step graph for the size of the latents."""
        return self.component

    def _run_reusing_outputs(self, component: str, feed: Mapping[str, torch.Tensor]) -> Tensors:
        return self.models.call(component, feed, reuse_outputs=True)

    def _prompt_outputs(self, conditioning: Mapping[str, torch.Tensor], key: Hashable) -> Mapping[str, torch.Tensor]:
        """Return the outputs of the prompt graph; compute them only for another prompt or updated weights."""
        tensors = list(conditioning.values())
        cache_key = (key, self.models.weights_version, *(tuple(t.shape) for t in tensors))
        if key is None:  # torch counts in-place changes of a tensor, except in inference mode
            cache_key = (*cache_key, *(None if t.is_inference() else t._version for t in tensors))
        same_tensors = key is not None or (
            all(a is b for a, b in zip(tensors, self.conditioning, strict=False))
            and not any(t.is_inference() for t in tensors)
        )
        if not (same_tensors and cache_key == self.prompt_cache_key):
            self.prompt = self.graphs.prompt_outputs(conditioning)
            self.prompt_cache_key, self.conditioning = cache_key, tensors
        return self.prompt
