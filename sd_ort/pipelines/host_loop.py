"""The sampling loop on the host: the UNet's sessions and the scheduler's steps, over float32 arrays.

Everything that does not change between steps is computed, and cast to the graph's dtypes, once: in a hoisted folder
that is the graph `unet_prompt`, and `unet_time` for all steps in one call.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sd_ort.checkpoints.linear_schedule import LinearSchedule
from sd_ort.core.errors import InputError
from sd_ort.core.progress import step_bar
from sd_ort.pipelines.controlnet_inputs import MIDDLE, ControlNetInput
from sd_ort.pipelines.request import Request
from sd_ort.pipelines.sampling_job import InpaintBlend
from sd_ort.runtime.session import Model

if TYPE_CHECKING:
    from sd_ort.checkpoints.schedule import NonlinearSchedule
    from sd_ort.pipelines.scheduler import Schedule


class Denoiser:
    """Noise predictions of a folder's UNet for one prompt and one schedule: plain, hoisted, or with ControlNets.

    `conditioning`: the UNet's inputs by name beside sample and timestep, each (rows, ...), float32; with guidance the
    rows are negative, then positive. `timesteps` (T,): those of the schedule, in order.
    """

    def __init__(
        self,
        models: Mapping[str, Model],
        conditioning: Mapping[str, np.ndarray],
        timesteps: np.ndarray,
        controls: Sequence[ControlNetInput] = (),
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

    def __call__(self, index: int, sample: np.ndarray) -> np.ndarray:
        """Predicted noise (rows, C, h, w), float32, for the scaled latents `sample` (rows, C, h, w) of step `index`."""
        unet = self.models["unet"]
        feed = {"sample": sample, **self.fixed, **{name: v[index] for name, v in self.by_step.items()}}
        if "timestep" in unet.inputs:
            feed["timestep"] = unet.one("timestep", self.timesteps[index])
        for control, shown in zip(self.controls, self.shown, strict=True):
            for name, residual in self._residuals(control, shown, index, sample).items():
                feed[name] = feed[name] + residual if name in feed else residual
        return unet(**feed)["out_sample"].astype(np.float32)

    def _hoist(self) -> None:
        """Run the prompt's graph, then the time graph for all steps at once; `by_step` becomes (steps, rows, ...)."""
        prompt = self.models["unet_prompt"]
        self.fixed = prompt(**{name: self.conditioning[name] for name in prompt.inputs})
        time = self.models["unet_time"]
        steps, rows = len(self.timesteps), len(next(iter(self.conditioning.values())))
        feed = {
            name: np.repeat(self.timesteps.astype(np.float64), rows)
            if name == "timestep"
            else np.concatenate([self.fixed[name]] * steps)
            for name in time.inputs
        }
        self.by_step = {name: v.reshape(steps, rows, *v.shape[1:]) for name, v in time(**feed).items()}

    def _shown(self, control: ControlNetInput) -> dict[str, np.ndarray]:
        """What a ControlNet is given at every step; in guess mode, of the positive rows alone, the last ones."""
        controlnet = self.models[control.name]
        given = {name: value[-len(control.image) :] for name, value in self.conditioning.items()}
        given["controlnet_cond"] = control.image
        return {name: given[name].astype(controlnet.dtype(name)) for name in controlnet.inputs if name in given}

    def _residuals(
        self, control: ControlNetInput, shown: Mapping[str, np.ndarray], index: int, sample: np.ndarray
    ) -> dict[str, np.ndarray]:
        """What a ControlNet adds to the UNet's skip connections and its middle block, by the UNet's names."""
        controlnet = self.models[control.name]
        seen = sample[-len(control.image) :, : controlnet.inputs["sample"].shape[1]]
        scale = np.full((1,), control.scales[index])
        time = controlnet.one("timestep", self.timesteps[index])
        outputs = controlnet(sample=seen, timestep=time, conditioning_scale=scale, **shown)
        named = {MIDDLE.get(name, name): value for name, value in outputs.items()}
        return scale_guess_mode_residuals(named, len(sample)) if control.guess else named


def scale_guess_mode_residuals(residuals: Mapping[str, np.ndarray], rows: int) -> dict[str, np.ndarray]:
    """Residuals of guess mode: from 0.1 of the outermost to all of the middle block's, evenly on a logarithmic scale,
    as the authors of ControlNet have it, and zeros in front for the negative ones of `rows`."""
    made = {}
    for factor, (name, value) in zip(np.logspace(-1, 0, len(residuals)), residuals.items(), strict=True):
        made[name] = np.zeros((rows, *value.shape[1:]), value.dtype)
        made[name][rows - len(value) :] = value * value.dtype.type(factor)
    return made


class LinearSteps:
    """The steps of a linear schedule. `noise`: its noise samples (S, B, C, h, w)."""

    def __init__(self, schedule: LinearSchedule, noise: Sequence[np.ndarray]) -> None:
        self.schedule, self.noise = schedule, noise
        self.history: list[tuple[np.ndarray, np.ndarray]] = []  # latents and predictions, the last step's first

    def scale(self, index: int, latents: np.ndarray) -> np.ndarray:
        """Return the UNet's sample."""
        return latents * self.schedule.input_scales[index]

    def step(self, index: int, prediction: np.ndarray, latents: np.ndarray) -> np.ndarray:
        """Return the latents after a step."""
        coefficients, factors = self.schedule.coefficients[index], self.schedule.noise_coefficients[index]
        self.history = [(latents, prediction), *self.history][: len(coefficients)]
        terms = [pair for step in zip(coefficients, self.history, strict=False) for pair in zip(*step, strict=True)]
        terms += zip(factors, self.noise, strict=True)
        total = np.zeros_like(latents)
        for factor, array in terms:
            if factor:
                total += factor * array
        return total


class NonlinearSteps:
    """The steps of a diffusers scheduler."""

    def __init__(self, schedule: NonlinearSchedule, generator: Any) -> None:
        self.scheduler, self.timesteps = schedule.scheduler, schedule.timesteps
        takes = inspect.signature(self.scheduler.step).parameters  # eta: DDIM; generator: ancestral and SDE schedulers
        options = {"eta": schedule.eta, "generator": generator}
        self.options = {name: value for name, value in options.items() if name in takes}

    def scale(self, index: int, latents: np.ndarray) -> np.ndarray:
        import torch

        scaled: np.ndarray = self.scheduler.scale_model_input(torch.from_numpy(latents), self.timesteps[index]).numpy()
        return scaled

    def step(self, index: int, prediction: np.ndarray, latents: np.ndarray) -> np.ndarray:
        import torch

        tensors = torch.from_numpy(prediction), self.timesteps[index], torch.from_numpy(latents)
        after: np.ndarray = self.scheduler.step(*tensors, **self.options).prev_sample.numpy()
        return after


def denoise(
    pipeline: Any,
    latents: np.ndarray,
    schedule: Schedule,
    noise: Sequence[np.ndarray],
    denoiser: Denoiser,
    request: Request,
    channels: np.ndarray | None,
    kept: InpaintBlend | None,
) -> np.ndarray:
    """Return the latents (B, C, h, w) after the last step. With guidance the UNet reads 2B rows, negative first.

    `pipeline`: what callbacks are given, with `num_timesteps`; one that sets `_interrupt`, as in diffusers, ends the
    loop. `noise`: the noise samples of a linear schedule. `channels`, `kept`: see `pipelines.sampling`.
    """
    vars(pipeline).pop("_interrupt", None)
    pipeline.num_timesteps = len(schedule.timesteps)
    steps: LinearSteps | NonlinearSteps
    if isinstance(schedule, LinearSchedule):
        steps = LinearSteps(schedule, noise)
    else:
        steps = NonlinearSteps(schedule, request.generator)
    with step_bar(range(len(schedule.timesteps)), request.progress) as bar:
        for index in bar:
            sample = steps.scale(index, latents)
            if channels is not None:
                sample = np.concatenate([sample, channels], 1)
            if request.guidance is None:
                prediction = denoiser(index, sample)
            else:
                prediction = guided(denoiser(index, np.concatenate([sample, sample])), request)
            latents = steps.step(index, prediction, latents)
            if kept is not None:
                latents = kept.after_step(latents, index)
            if request.callback_on_step_end is not None:
                latents = _call_back(pipeline, index, schedule.timesteps[index], latents, request)
                if vars(pipeline).pop("_interrupt", False):
                    break
    return latents


def _call_back(pipeline: Any, index: int, timestep: Any, latents: np.ndarray, request: Request) -> np.ndarray:
    import torch

    assert request.callback_on_step_end is not None
    state = {"latents": torch.from_numpy(latents)}
    replaced = request.callback_on_step_end(pipeline, index, torch.as_tensor(timestep), state) or {}
    after: np.ndarray = replaced.get("latents", state["latents"]).numpy()
    return after


def guided(noise: np.ndarray, request: Request) -> np.ndarray:
    """The prediction of 2B rows, negative first -> the guided one of B rows.

    `guidance_rescale` gives it back some of the positive prediction's deviation (Lin et al., 2023, section 3.4).
    """
    assert request.guidance is not None
    negative, positive = np.split(noise, 2)
    made = negative + np.float32(request.guidance) * (positive - negative)
    if not request.guidance_rescale:
        return made
    axes, share = tuple(range(1, made.ndim)), np.float32(request.guidance_rescale)
    deviations = (each.std(axes, ddof=1, keepdims=True) for each in (positive, made))
    rescaled = made * np.divide(*deviations)
    return share * rescaled + (1 - share) * made
