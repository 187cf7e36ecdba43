"""The buffers and graphs of a schedule in the loop on the device."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from sd_ort.graphs import sampling_graphs
from sd_ort.graphs.sampling_graphs import GUIDANCE_HALVES, SchedulerStepSpec, identifier
from sd_ort.runtime.ort_values import write_value
from sd_ort.runtime.session import DTYPES

if TYPE_CHECKING:
    from sd_ort.checkpoints.linear_schedule import LinearSchedule
    from sd_ort.pipelines.device.loop import Buffers
    from sd_ort.pipelines.sampling_job import SamplingJob
    from sd_ort.runtime.bound_run import BoundRun


class Steps:
    """The buffers and graphs of a schedule: `before` runs once a drawing, then `unet` and `between` in turn; `renewed`
    runs when the schedule is another one, or when `is_outdated`: weights were updated in place."""

    def __init__(self, buffers: Buffers, drawing: SamplingJob) -> None:
        loop, self.schedule = buffers.loop, drawing.schedule
        self.before = [buffers.prompt] if buffers.prompt is not None else []
        self.renewed: list[BoundRun] = []
        self.is_outdated = False
        unet = buffers.loop.models["unet"]
        count, window = drawing.schedule.coefficients.shape[:2]
        self.rows = drawing.rows
        self.arrays = self._arrays(drawing)
        self.values = buffers.values | {name: loop.value(array) for name, array in self.arrays.items()}
        self.values["last_latents"] = self.values["latents"]
        self.values["index"] = self.values["index_out"] = loop.value(np.zeros(1, np.int64))
        by_step: dict[str, np.dtype] = {}
        if buffers.prompt is not None:
            by_step = self._time(buffers, count + 1)
        what = SchedulerStepSpec(
            np.dtype(unet.dtype("sample")),
            None if buffers.timestep is None else buffers.timestep.dtype,
            buffers.timestep is not None and not buffers.timestep.ndim,
            tuple(by_step.items()),
            control_scales=tuple(buffers.controls.dtypes),
            window=window,
            scales_input=bool((drawing.schedule.input_scales != 1).any()),
            guidance=drawing.guidance is not None,
            rescales_guidance=bool(drawing.guidance is not None and drawing.rescale),
            noise_count=0 if drawing.draws is None else self.arrays["drawn"].shape[1],
            extra_channels=drawing.channels is not None,
            inpaints=drawing.kept is not None,
            split_guidance=drawing.side is not None,
        )
        if window > 1:
            shape = (window, what.term_count, *drawing.latents.shape)
            self.values["history"] = self.values["history_out"] = loop.empty(shape, np.float32)
        self.before.append(loop.graph(sampling_graphs.scheduler_step_graph, replace(what, initial=True), self.values))
        if buffers.unet is None:
            buffers.unet = loop.bind(unet, buffers.values)
        self.unet = buffers.unet
        self.noise = self.unet.outputs["out_sample"]
        self.values["noise"] = self.noise
        if drawing.side is not None:
            # Of a split guidance: here the other side puts its predictions.
            dtype = DTYPES[self.noise.data_type()]
            self.received = loop.value(np.zeros(self.noise.shape(), dtype))
            for side in GUIDANCE_HALVES:
                self.values[f"{side}_noise"] = self.noise if side == drawing.side else self.received
        self.between = loop.repeated(sampling_graphs.scheduler_step_graph, what, self.values)
        self.every = [*buffers.controls.every, self.unet, self.between]

    def _arrays(self, drawing: SamplingJob) -> dict[str, np.ndarray]:
        """What the graphs read from the host, with one entry more than steps: the input of a step that is not made."""
        schedule = drawing.schedule
        timesteps = np.append(schedule.timesteps, schedule.timesteps[-1:])
        guidance = None if drawing.rescale else drawing.guidance
        arrays = {
            **tables(schedule, guidance),
            "scales": np.append(schedule.input_scales, schedule.input_scales[-1:]),
            "timesteps": timesteps,
            "rows_timesteps": np.repeat(timesteps, self.rows),
            "start": drawing.latents,
        }
        if drawing.guidance is not None:
            arrays["guidance"] = np.array([drawing.guidance], np.float32)
            arrays["rescale"] = np.array([drawing.rescale], np.float32)
        if drawing.draws is not None:
            arrays["draws"] = drawing.draws
        for number, control in enumerate(drawing.controls):
            arrays[f"scales_{number}"] = np.array([*control.scales, 0.0])
        if drawing.channels is not None:
            arrays["channels"] = drawing.channels
        if (kept := drawing.kept) is not None:
            arrays |= {"picture": kept.picture, "picture_noise": kept.noise, "mask": kept.mask}
            arrays |= {"kept_picture": kept.picture_factors, "kept_noise": kept.noise_factors}
        kinds = {"slots": np.bool_, "drawn": np.int64}
        return {name: np.ascontiguousarray(array, kinds.get(name, np.float32)) for name, array in arrays.items()}

    def _time(self, buffers: Buffers, states: int) -> dict[str, np.dtype]:
        """Run the time graph for all steps at once; the UNet's inputs that change with the step, and their dtypes."""
        loop, prompt = buffers.loop, buffers.prompt
        assert prompt is not None
        model = loop.models["unet_time"]
        feed = {}
        conditioning = {name: np.dtype(model.dtype(name)) for name in model.inputs if name != "timestep"}
        if conditioning:
            row = loop.value(np.tile(np.arange(self.rows), states))
            values = {identifier(name): prompt.outputs[name] for name in conditioning} | {"row": row}
            spread = loop.graph(sampling_graphs.repeat_rows_graph, tuple(conditioning.items()), values)
            self.before.append(spread)
            feed = {name: spread.outputs[f"every_{identifier(name)}"] for name in conditioning}
        dtype = model.dtype("timestep")
        self.time_input = loop.value(self.arrays["rows_timesteps"].astype(dtype))
        self.time_dtype = dtype
        bound = loop.bind(model, {**feed, "timestep": self.time_input})
        (self.before if feed else self.renewed).append(bound)  # binding runs it: its numbers are there
        self.values["place"] = loop.value(np.arange(states * self.rows).reshape(states, self.rows))
        by_step = {}
        for output in model.session.get_outputs():
            every = bound.outputs[output.name]
            by_step[output.name] = np.dtype(DTYPES[output.type])
            if output.name not in buffers.values:
                shape = [self.rows, *every.shape()[1:]]
                buffers.values[output.name] = loop.empty(shape, by_step[output.name])
            self.values[f"every_{identifier(output.name)}"] = every
            self.values[identifier(output.name)] = buffers.values[output.name]
        return by_step

    def give(self, drawing: SamplingJob) -> list[BoundRun]:
        """Copy to the device what this drawing has of its own; the schedule only when it is another one. Returns what
        has to run for that."""
        arrays, run = self._arrays(drawing), self.renewed if self.is_outdated else []
        self.is_outdated = False
        for name, array in arrays.items():
            if name in self.values and not np.array_equal(array, self.arrays[name]):
                write_value(self.values[name], array)
                if name == "rows_timesteps" and hasattr(self, "time_input"):
                    write_value(self.time_input, array.astype(self.time_dtype))
                    run = self.renewed
        self.arrays = arrays
        return run


def tables(schedule: LinearSchedule, guidance: float | None) -> dict[str, np.ndarray]:
    """What `scheduler_step_graph` reads of a schedule of T steps, with a row more: before the first step there is
    nothing to sum up. With `guidance` a prediction's factor stands for the negative one's, and the positive one's."""
    count, window = schedule.coefficients.shape[:2]
    latents, prediction = np.moveaxis(schedule.coefficients.astype(np.float64), 2, 0)
    sides = [prediction] if guidance is None else [prediction * (1 - guidance), prediction * guidance]
    factors = np.stack([latents, *sides], 2)
    steps, back = np.mgrid[:count, :window]
    slot = (steps - back) % window
    weights = np.zeros((count + 1, *factors.shape[1:]))
    weights[steps + 1, slot] = factors
    made = {"weights": weights.reshape(count + 1, -1)}
    if window > 1:
        made["slots"] = np.zeros((count + 1, window), np.bool_)
        made["slots"][steps[:, 0] + 1, slot[:, 0]] = True
    if schedule.noise_count:
        most = max(1, int((schedule.noise_coefficients != 0).sum(1).max()))
        drawn = np.argsort(schedule.noise_coefficients == 0, 1, kind="stable")[
            :, :most
        ]  # those that a step reads come first
        made["drawn"] = np.concatenate([drawn[:1], drawn])
        read = np.take_along_axis(schedule.noise_coefficients, drawn, 1)
        made["drawn_weights"] = np.concatenate([np.zeros_like(read[:1]), read])
        if window == 1:
            made["weights"] = np.concatenate([made["weights"], made.pop("drawn_weights")], 1)
    return made
