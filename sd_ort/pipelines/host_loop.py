"""The sampling loop on the host: the UNet's sessions and the scheduler's steps, over float32 arrays.

Everything that does not change between steps is computed, and cast to the graph's dtypes, once: in a hoisted folder
that is the prompt's graph, and the time graph for all steps in one call.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sd_ort.checkpoints.linear_schedule import LinearSchedule
from sd_ort.core.denoiser_graphs import ArrayDenoiserGraphs
from sd_ort.core.errors import InputError
from sd_ort.core.pipeline_folder import DEEP_FEATURES
from sd_ort.core.progress import step_bar
from sd_ort.pipelines.controlnet_inputs import MIDDLE, ControlNetInput
from sd_ort.pipelines.images import as_array, as_tensor
from sd_ort.pipelines.request import Request
from sd_ort.pipelines.sampling_job import InpaintBlend
from sd_ort.runtime.session import OrtModel

if TYPE_CHECKING:
    from sd_ort.checkpoints.schedule import NonlinearSchedule
    from sd_ort.pipelines.partial_steps import ShallowSteps
    from sd_ort.pipelines.scheduler import Schedule


class Denoiser:
    """Noise predictions of a folder's UNet for one prompt and one schedule: in one graph, hoisted, or with ControlNets.

    `conditioning`: the UNet's inputs by name beside sample and timestep, each (rows, ...), float32; with guidance the
    rows are negative, then positive. `timesteps` (T,): those of the schedule, in order. `unet`: key of the UNet.
    `perturbed`: the number of rows, the last ones, with perturbed attention. `shallow_steps`: those that read the deep
    features of the last full step; the first step is a full one.
    """

    def __init__(
        self,
        models: Mapping[str, OrtModel],
        conditioning: Mapping[str, np.ndarray],
        timesteps: np.ndarray,
        controls: Sequence[ControlNetInput] = (),
        unet: str = "unet",
        perturbed: int = 0,
        shallow_steps: ShallowSteps | None = None,
    ) -> None:
        """Run the hoisted parts. Raises InputError if the UNet needs a ControlNet and there is no image for it."""
        self.models = models
        self.conditioning = conditioning
        self.timesteps = timesteps
        self.controls = controls
        self.unet = unet
        self.perturbed = perturbed
        self.shallow_steps = shallow_steps
        self.deep_features: np.ndarray | None = None
        if not controls and "controlnet" in models:
            raise InputError("this UNet was exported for a ControlNet: give a control_image (--control-image).")
        graphs = ArrayDenoiserGraphs("unet", models)
        inputs = {**conditioning, **graphs.prompt_outputs(conditioning)}
        rows = len(next(iter(conditioning.values())))
        self.by_step = graphs.steps_outputs(inputs, timesteps.astype(np.float64), rows)
        model = models[unet]
        self.fixed = {name: inputs[name].astype(model.dtype(name)) for name in model.inputs if name in inputs}
        if perturbed:
            from sd_ort.graphs.perturbed_attention import ROWS

            numbers = np.arange(len(conditioning["encoder_hidden_states"]))
            self.fixed[ROWS] = np.where(numbers < len(numbers) - perturbed, numbers, numbers + len(numbers))
        self.control_inputs = [self._control_inputs(control) for control in controls]

    def __call__(self, index: int, sample: np.ndarray) -> np.ndarray:
        """Predicted noise (rows, C, h, w), float32, for the scaled latents `sample` (rows, C, h, w) of step `index`."""
        unet, shallow = self.models[self.unet], self.shallow_steps
        is_full = shallow is None or self.deep_features is None or shallow.is_full(index)
        feed = {"sample": sample, **self.fixed, **{name: v[index] for name, v in self.by_step.items()}}
        if "timestep" in unet.inputs:
            feed["timestep"] = unet.one("timestep", self.timesteps[index])
        for control, inputs in zip(self.controls, self.control_inputs, strict=True):
            for name, residual in self._residuals(control, inputs, index, sample).items():
                feed[name] = feed[name] + residual if name in feed else residual
        if shallow is not None and not is_full:
            unet = shallow.open_model()
            feed[DEEP_FEATURES] = self.deep_features
            feed = {name: value for name, value in feed.items() if name in unet.inputs}
        outputs = unet(**feed)
        self.deep_features = outputs.get(DEEP_FEATURES, self.deep_features)
        return outputs["out_sample"].astype(np.float32)

    def _control_inputs(self, control: ControlNetInput) -> dict[str, np.ndarray]:
        """Return the inputs of a ControlNet that do not change between steps; in guess mode those of the positive rows.

        The positive rows are the last ones.
        """
        controlnet = self.models[control.name]
        inputs = {name: value[-len(control.image) :] for name, value in self.conditioning.items()}
        inputs["controlnet_cond"] = control.image
        return {name: inputs[name].astype(controlnet.dtype(name)) for name in controlnet.inputs if name in inputs}

    def _residuals(
        self, control: ControlNetInput, inputs: Mapping[str, np.ndarray], index: int, sample: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Return a ControlNet's residuals for the UNet's skip connections and middle block, by the UNet's names."""
        controlnet = self.models[control.name]
        sample_rows = sample[-len(control.image) :, : controlnet.inputs["sample"].shape[1]]
        scale = np.full((1,), control.scales[index])
        time = controlnet.one("timestep", self.timesteps[index])
        outputs = controlnet(sample=sample_rows, timestep=time, conditioning_scale=scale, **inputs)
        named = {MIDDLE.get(name, name): value for name, value in outputs.items()}
        return scale_guess_mode_residuals(named, len(sample)) if control.guess else named


def scale_guess_mode_residuals(residuals: Mapping[str, np.ndarray], rows: int) -> dict[str, np.ndarray]:
    """Return the residuals of guess mode, scaled from 0.1 for the outermost to 1 for the middle block's.

    The factors are evenly spaced on a logarithmic scale, as in ControlNet's own code. The negative ones of `rows`, in
    front, are zeros.
    """
    scaled = {}
    for factor, (name, value) in zip(np.logspace(-1, 0, len(residuals)), residuals.items(), strict=True):
        scaled[name] = np.zeros((rows, *value.shape[1:]), value.dtype)
        scaled[name][rows - len(value) :] = value * value.dtype.type(factor)
    return scaled


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

        return self.scheduler.scale_model_input(torch.from_numpy(latents), self.timesteps[index]).numpy()

    def step(self, index: int, prediction: np.ndarray, latents: np.ndarray) -> np.ndarray:
        import torch

        tensors = torch.from_numpy(prediction), self.timesteps[index], torch.from_numpy(latents)
        return self.scheduler.step(*tensors, **self.options).prev_sample.numpy()


def denoise(
    pipeline: Any,
    latents: np.ndarray,
    schedule: Schedule,
    noise: Sequence[np.ndarray],
    denoiser: Denoiser,
    request: Request,
    channels: np.ndarray | None,
    blend: InpaintBlend | None,
) -> np.ndarray:
    """Return the latents (B, C, h, w) after the last step.

    With guidance the UNet reads 2B rows, negative first, and then B perturbed rows if there are any.

    `pipeline`: argument of callbacks. `noise`: the noise samples of a linear schedule. `channels`, `blend`: see
    `pipelines.sampling`.
    """
    pipeline._num_timesteps = len(schedule.timesteps)
    steps: LinearSteps | NonlinearSteps
    if isinstance(schedule, LinearSchedule):
        steps = LinearSteps(schedule, noise)
    else:
        steps = NonlinearSteps(schedule, request.generator)
    state = StepState(
        latents, denoiser, request.guidance, request.guidance_rescale, channels, blend, request.is_perturbed
    )
    with step_bar(range(len(schedule.timesteps)), request.progress) as bar:
        for index in bar:
            sample = steps.scale(index, state.latents)
            if state.channels is not None:
                sample = np.concatenate([sample, state.channels], 1)
            noise_rows = state.denoiser(index, np.concatenate([sample] * state.rows_per_image))
            prediction = apply_guidance(noise_rows, state, _pag_scale(pipeline, schedule.timesteps[index]))
            state.latents = steps.step(index, prediction, state.latents)
            if state.blend is not None:
                state.latents = state.blend.after_step(state.latents, index)
            if request.callback_on_step_end is not None:
                result = state.latents
                state.call_back(pipeline, request, index, schedule.timesteps[index])
                if pipeline._interrupt and pipeline.CAN_INTERRUPT:
                    break
                if index == len(schedule.timesteps) - 1 and not pipeline.CHANGES_LAST_LATENTS:
                    return result
    return state.latents


# diffusers' name of a tensor -> the UNet's input. With guidance each has 2B rows, negative first.
CONDITIONING_TENSORS = {
    "prompt_embeds": "encoder_hidden_states",
    "add_text_embeds": "text_embeds",
    "add_time_ids": "time_ids",
    "w_embedding": "timestep_cond",
}
# The negative rows of these inputs, which a callback can read; diffusers ignores changes of them.
NEGATIVE_TENSORS = {
    "negative_prompt_embeds": "encoder_hidden_states",
    "negative_pooled_prompt_embeds": "text_embeds",
    "negative_add_time_ids": "time_ids",
    "add_neg_time_ids": "time_ids",
}


@dataclass
class StepState:
    """State of the loop that a step reads and callback_on_step_end can change."""

    latents: np.ndarray
    denoiser: Denoiser
    guidance: float | None
    guidance_rescale: float
    channels: np.ndarray | None
    blend: InpaintBlend | None
    is_perturbed: bool = False

    @property
    def rows_per_image(self) -> int:
        """Rows that the UNet reads per image."""
        return 1 + (self.guidance is not None) + self.is_perturbed

    def call_back(self, pipeline: Any, request: Request, index: int, timestep: Any) -> None:
        """Call callback_on_step_end and apply its changes.

        These are tensors (see `as_tensor`), and the pipeline's `_guidance_scale` and `_guidance_rescale`.
        """
        assert request.callback_on_step_end is not None
        names = list(request.callback_tensors)
        tensors = {name: self._tensor(name) for name in names}
        after = request.callback_on_step_end(pipeline, index, as_tensor(timestep), dict(tensors)) or {}
        changed: dict[str, Any] = {name: after[name] for name in names if after.get(name) is not None}
        for name, value in changed.items():
            changed[name] = [as_array(each) for each in value] if isinstance(value, list) else as_array(value)
        embedded = request.embedded_guidance is not None
        self.guidance = None if embedded or pipeline._guidance_scale <= 1 else pipeline._guidance_scale
        self.guidance_rescale = pipeline._guidance_rescale
        self.latents = changed.pop("latents", self.latents)
        count = len(self.latents)
        if self.blend is not None and "mask" in changed:
            self.blend = replace(self.blend, mask=changed["mask"][:count])
        elif self.channels is not None:
            mask, image = np.split(self.channels, [1], 1)
            mask, image = changed.get("mask", mask)[:count], changed.get("masked_image_latents", image)[:count]
            self.channels = np.concatenate([mask, image], 1)
        self._condition(changed, pipeline.CONTROLNET_READS_CHANGES)

    def _tensor(self, name: str) -> Any:
        """Return a tensor that a callback reads, by diffusers' name. Raises InputError if this call has none."""
        rows, conditioning = len(self.latents), self.denoiser.conditioning
        copies = self.rows_per_image
        if name == "latents":
            return as_tensor(self.latents)
        if input_name := CONDITIONING_TENSORS.get(name):
            return as_tensor(conditioning[input_name])
        if input_name := NEGATIVE_TENSORS.get(name):
            return None if self.guidance is None else as_tensor(conditioning[input_name][:rows])
        if name in ("image", "control_image") and self.denoiser.controls:
            images = [as_tensor(control.image) for control in self.denoiser.controls]
            return images if len(images) > 1 else images[0]
        if name == "mask" and self.blend is not None:
            return as_tensor(np.concatenate([self.blend.mask] * copies))
        if name == "masked_image_latents" and self.blend is not None and self.blend.masked_image is not None:
            return as_tensor(np.concatenate([self.blend.masked_image] * copies))
        if name in ("mask", "masked_image_latents") and self.channels is not None:
            channels = self.channels[:, :1] if name == "mask" else self.channels[:, 1:]
            return as_tensor(np.concatenate([channels] * copies))
        raise InputError(f"callback_on_step_end_tensor_inputs: this call has no {name} to give.")

    def _condition(self, changed: Mapping[str, Any], controlnet_reads_changes: bool) -> None:
        """Apply changed conditioning and control images to the next steps; without guidance, the positive rows."""
        denoiser, rows = self.denoiser, len(self.latents) * self.rows_per_image
        inputs = {CONDITIONING_TENSORS[name]: value for name, value in changed.items() if name in CONDITIONING_TENSORS}
        image = changed.get("image", changed.get("control_image"))
        if not inputs and image is None and rows == len(denoiser.conditioning["encoder_hidden_states"]):
            return
        arrays = {name: value[-rows:] for name, value in {**denoiser.conditioning, **inputs}.items()}
        images = [control.image for control in denoiser.controls] if image is None else image
        images = images if isinstance(images, list) else [images]
        if len(images) != len(denoiser.controls):
            raise InputError(
                f"a callback returned {len(images)} control images for {len(denoiser.controls)} ControlNets."
            )
        controls = [
            replace(control, image=each[-rows:]) for control, each in zip(denoiser.controls, images, strict=True)
        ]
        self.denoiser = Denoiser(
            denoiser.models, arrays, denoiser.timesteps, controls, denoiser.unet, denoiser.perturbed,
            denoiser.shallow_steps,
        )  # fmt: skip
        if not controlnet_reads_changes:
            self.denoiser.control_inputs = [
                {name: value[-rows:] for name, value in inputs.items()} for inputs in denoiser.control_inputs
            ]


def _pag_scale(pipeline: Any, timestep: Any) -> float:
    """Return the scale of perturbed attention guidance at a timestep."""
    scale, decrease = float(pipeline._pag_scale), float(pipeline._pag_adaptive_scale)
    return max(scale - decrease * (1000 - float(timestep)), 0.0) if decrease > 0 else scale


def apply_guidance(noise: np.ndarray, state: StepState, pag_scale: float) -> np.ndarray:
    """Return the guided prediction (B rows) for predictions of the rows of `StepState`.

    `guidance_rescale` restores a share of the positive prediction's deviation (Lin et al., 2023, section 3.4).
    """
    parts = np.split(noise, state.rows_per_image)
    perturbed = parts.pop() if state.is_perturbed else None
    prediction = positive = parts[-1]
    if state.guidance is not None:
        prediction = parts[0] + np.float32(state.guidance) * (positive - parts[0])
    if perturbed is not None:
        prediction = prediction + np.float32(pag_scale) * (positive - perturbed)
    if state.guidance is None or not state.guidance_rescale:
        return prediction
    axes, share = tuple(range(1, prediction.ndim)), np.float32(state.guidance_rescale)
    deviations = (array.std(axes, ddof=1, keepdims=True) for array in (positive, prediction))
    rescaled = prediction * np.divide(*deviations)
    return share * rescaled + (1 - share) * prediction
