"""The UNet as a function of latents and a step, for one prompt and one schedule: plain, hoisted, or with a ControlNet.

Everything that does not change between steps is computed, and cast to the graph's dtypes, once: in a hoisted folder
that is the graph `unet_prompt`, and `unet_time` for all steps in one call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from sd_ort.core.errors import InputError
from sd_ort.runtime.session import Model

# ControlNet output -> UNet input, where their names differ.
MIDDLE = {"mid_block_res_sample": "mid_block_additional_residual"}


@dataclass
class Control:
    """What a ControlNet is shown: image (rows, 3, H, W) in 0..1, and the factor of its residuals at each step."""

    image: torch.Tensor
    scales: list[float]


class Denoiser:
    """Noise predictions of a folder's UNet.

    `conditioning`: the UNet's inputs by name beside sample and timestep, each (rows, ...), float32; with guidance the
    rows are negative, then positive. `timesteps`: those of the schedule, in order.
    """

    def __init__(
        self,
        models: Mapping[str, Model],
        conditioning: Mapping[str, torch.Tensor],
        timesteps: torch.Tensor,
        control: Control | None = None,
    ) -> None:
        """Run what runs once. Raises InputError when the UNet wants a ControlNet and there is no image for it."""
        self.models = models
        self.conditioning = {name: value.numpy() for name, value in conditioning.items()}
        self.timesteps = timesteps
        self.control = control
        self.by_step: dict[str, np.ndarray] = {}
        self.fixed: dict[str, np.ndarray] = {}
        if control is None and "controlnet" in models:
            raise InputError("this UNet was exported for a ControlNet: give a control_image (--control-image).")
        if control is not None and "controlnet" not in models:
            raise InputError("this folder has no ControlNet for the control image: export with --controlnet.")
        if "unet_prompt" in models:
            self._hoist()
        unet = models["unet"]
        given = {**self.conditioning, **self.fixed}
        self.fixed = {name: given[name].astype(unet.dtype(name)) for name in unet.inputs if name in given}
        if control is not None:
            self._open_controlnet(control)

    def __call__(self, index: int, sample: torch.Tensor) -> torch.Tensor:
        """Predicted noise (rows, C, h, w), float32, for the scaled latents `sample` (rows, C, h, w) of step `index`."""
        unet = self.models["unet"]
        feed = {"sample": sample.numpy(), **self.fixed, **{name: v[index] for name, v in self.by_step.items()}}
        if "timestep" in unet.inputs:
            feed["timestep"] = self._time(unet, index)
        if self.control is not None:
            feed |= self._residuals(index, sample)
        return torch.from_numpy(unet(**feed)["out_sample"]).float()

    def _time(self, model: Model, index: int) -> np.ndarray:
        return np.full((1,) * len(model.inputs["timestep"].shape), self.timesteps[index].item())

    def _hoist(self) -> None:
        """Run the prompt's graph, then the time graph for all steps at once; `by_step` becomes (steps, rows, ...)."""
        prompt = self.models["unet_prompt"]
        self.fixed = prompt(**{name: self.conditioning[name] for name in prompt.inputs})
        time = self.models["unet_time"]
        steps, rows = len(self.timesteps), len(next(iter(self.conditioning.values())))
        feed = {
            name: np.repeat(self.timesteps.double().numpy(), rows)
            if name == "timestep"
            else np.concatenate([self.fixed[name]] * steps)
            for name in time.inputs
        }
        self.by_step = {name: v.reshape(steps, rows, *v.shape[1:]) for name, v in time(**feed).items()}

    def _open_controlnet(self, control: Control) -> None:
        controlnet = self.models["controlnet"]
        given = {**self.conditioning, "controlnet_cond": control.image.numpy()}
        self.shown = {name: given[name].astype(controlnet.dtype(name)) for name in controlnet.inputs if name in given}

    def _residuals(self, index: int, sample: torch.Tensor) -> dict[str, np.ndarray]:
        assert self.control is not None
        controlnet = self.models["controlnet"]
        scale = np.full((1,), self.control.scales[index])
        time = self._time(controlnet, index)
        outputs = controlnet(sample=sample.numpy(), timestep=time, conditioning_scale=scale, **self.shown)
        return {MIDDLE.get(name, name): value for name, value in outputs.items()}
