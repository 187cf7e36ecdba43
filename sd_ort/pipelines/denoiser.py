"""The UNet as a function of latents and a step, for one prompt and one schedule: plain, hoisted, or with a ControlNet.

Everything that does not change between steps is computed, and cast to the graph's dtypes, once: in a hoisted folder
that is the graph `unet_prompt`, and `unet_time` for all steps in one call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from sd_ort.core.errors import InputError
from sd_ort.pipelines.controlnet_inputs import MIDDLE, Control
from sd_ort.runtime.session import Model


class Denoiser:
    """Noise predictions of a folder's UNet.

    `conditioning`: the UNet's inputs by name beside sample and timestep, each (rows, ...), float32; with guidance the
    rows are negative, then positive. `timesteps`: those of the schedule, in order.
    """

    def __init__(
        self,
        models: Mapping[str, Model],
        conditioning: Mapping[str, np.ndarray],
        timesteps: torch.Tensor,
        controls: Sequence[Control] = (),
    ) -> None:
        """Run what runs once. Raises InputError when the UNet wants a ControlNet and there is no image for it."""
        self.models = models
        self.conditioning = conditioning
        self.timesteps = timesteps
        self.controls = controls
        self.by_step: dict[str, np.ndarray] = {}
        self.fixed: dict[str, np.ndarray] = {}
        if not controls and "controlnet" in models:
            raise InputError("this UNet was exported for a ControlNet: give a control_image (--control-image).")
        if "unet_prompt" in models:
            self._hoist()
        unet = models["unet"]
        given = {**self.conditioning, **self.fixed}
        self.fixed = {name: given[name].astype(unet.dtype(name)) for name in unet.inputs if name in given}
        self.shown = [self._shown(control) for control in controls]

    def __call__(self, index: int, sample: torch.Tensor) -> torch.Tensor:
        """Predicted noise (rows, C, h, w), float32, for the scaled latents `sample` (rows, C, h, w) of step `index`."""
        unet = self.models["unet"]
        feed = {"sample": sample.numpy(), **self.fixed, **{name: v[index] for name, v in self.by_step.items()}}
        if "timestep" in unet.inputs:
            feed["timestep"] = unet.one("timestep", self.timesteps[index].item())
        for control, shown in zip(self.controls, self.shown, strict=True):
            for name, residual in self._residuals(control, shown, index, sample).items():
                feed[name] = feed[name] + residual if name in feed else residual
        return torch.from_numpy(unet(**feed)["out_sample"]).float()

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

    def _shown(self, control: Control) -> dict[str, np.ndarray]:
        """What a ControlNet is given at every step; in guess mode, of the positive rows alone, the last ones."""
        controlnet = self.models[control.name]
        given = {name: value[-len(control.image) :] for name, value in self.conditioning.items()}
        given["controlnet_cond"] = control.image.numpy()
        return {name: given[name].astype(controlnet.dtype(name)) for name in controlnet.inputs if name in given}

    def _residuals(
        self, control: Control, shown: Mapping[str, np.ndarray], index: int, sample: torch.Tensor
    ) -> dict[str, np.ndarray]:
        """What a ControlNet adds to the UNet's skip connections and its middle block, by the UNet's names."""
        controlnet = self.models[control.name]
        seen = sample.numpy()[-len(control.image) :, : controlnet.inputs["sample"].shape[1]]
        scale = np.full((1,), control.scales[index])
        time = controlnet.one("timestep", self.timesteps[index].item())
        outputs = controlnet(sample=seen, timestep=time, conditioning_scale=scale, **shown)
        named = {MIDDLE.get(name, name): value for name, value in outputs.items()}
        return guessed(named, len(sample)) if control.guess else named


def guessed(residuals: Mapping[str, np.ndarray], rows: int) -> dict[str, np.ndarray]:
    """Residuals of guess mode: from 0.1 of the outermost to all of the middle block's, evenly on a logarithmic scale,
    as the authors of ControlNet have it, and zeros in front for the negative ones of `rows`."""
    made = {}
    for factor, (name, value) in zip(np.logspace(-1, 0, len(residuals)), residuals.items(), strict=True):
        made[name] = np.zeros((rows, *value.shape[1:]), value.dtype)
        made[name][rows - len(value) :] = value * value.dtype.type(factor)
    return made
