"""Buffers and graphs of a sampling schedule in the device loop."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sd_ort.graphs import sampling_graphs
from sd_ort.graphs.sampling_graphs import GUIDANCE_HALVES, SchedulerStepSpec, identifier
from sd_ort.runtime.ort_values import write_value
from sd_ort.runtime.session import DTYPES

if TYPE_CHECKING:
    from sd_ort.checkpoints.linear_schedule import LinearSchedule
    from sd_ort.pipelines.device.sessions import BoundDenoiserGraphs, DeviceSessions
    from sd_ort.pipelines.sampling_job import SamplingJob
    from sd_ort.runtime.bound_run import BoundRun


class DeviceSchedule:
    """Buffers and graphs of one shape of schedule.

    `per_schedule` runs when the timesteps changed, or when `is_outdated`: weights were updated in place. `per_image`
    runs before the first step, and `step` after every U-Net call: guidance, scheduler and the next sample.
    """

    def __init__(
        self,
        sessions: DeviceSessions,
        job: SamplingJob,
        values: dict[str, Any],
        timestep: np.ndarray | None,
        graphs: BoundDenoiserGraphs,
        control_scales: tuple[np.dtype, ...],
    ) -> None:
        """Bind the graphs that run before the first step. The time graph's outputs are added to `values`.

        Args:
            timestep: array of the shape and dtype of the U-Net's timestep, None if it has none (a hoisted U-Net).
            graphs: the U-Net's, with the bound prompt graph if it is hoisted.
            control_scales: dtype of each ControlNet's conditioning_scale.
        """
        self.per_image = [graphs.runs[graphs.parts["prompt"]]] if graphs.is_hoisted else []
        self.per_schedule: list[BoundRun] = []
        self.is_outdated = False
        self.rows, self.sessions, self.unet_name = job.rows, sessions, job.unet
        self.time_input: Any = None
        self.arrays = self._arrays(job)
        self.values = values | {name: sessions.value(array) for name, array in self.arrays.items()}
        self.values["last_latents"] = self.values["latents"]
        self.values["index"] = self.values["index_out"] = sessions.value(np.zeros(1, np.int64))
        count, window = job.schedule.coefficients.shape[:2]
        step_inputs = self._bind_time_graph(values, graphs, count + 1) if graphs.is_hoisted else {}
        self.spec = SchedulerStepSpec(
            np.dtype(sessions.models[job.unet].dtype("sample")),
            None if timestep is None else timestep.dtype,
            timestep is not None and not timestep.ndim,
            tuple(step_inputs.items()),
            control_scales=control_scales,
            window=window,
            scales_input=bool((job.schedule.input_scales != 1).any()),
            guidance=job.guidance is not None,
            rescales_guidance=bool(job.guidance is not None and job.rescale),
            noise_count=0 if job.noise_samples is None else self.arrays["drawn"].shape[1],
            extra_channels=job.channels is not None,
            inpaints=job.blend is not None,
            split_guidance=job.side is not None,
        )
        if window > 1:
            shape = (window, self.spec.term_count, *job.latents.shape)
            self.values["history"] = self.values["history_out"] = sessions.empty(shape, np.float32)
        first = replace(self.spec, initial=True)
        self.per_image.append(sessions.graph(sampling_graphs.scheduler_step_graph, first, self.values))

    def bind_step(self, unet: BoundRun, side: str | None) -> None:
        """Bind the graph after the U-Net. `side`: the half of guidance that this device predicts, None for both."""
        self.noise = self.values["noise"] = unet.outputs["out_sample"]
        if side is not None:
            dtype = DTYPES[self.noise.data_type()]
            self.received = self.sessions.value(np.zeros(self.noise.shape(), dtype))  # the other device's prediction
            for half in GUIDANCE_HALVES:
                self.values[f"{half}_noise"] = self.noise if half == side else self.received
        self.step = self.sessions.step_graph(
            sampling_graphs.scheduler_step_graph, self.spec, self.values, self.unet_name
        )

    def _arrays(self, job: SamplingJob) -> dict[str, np.ndarray]:
        """Return the graphs' inputs, with an entry for one step more: the sample after the last step is not used."""
        schedule = job.schedule
        timesteps = np.append(schedule.timesteps, schedule.timesteps[-1:])
        guidance = None if job.rescale else job.guidance
        arrays = {
            **schedule_tables(schedule, guidance),
            "scales": np.append(schedule.input_scales, schedule.input_scales[-1:]),
            "timesteps": timesteps,
            "rows_timesteps": np.repeat(timesteps, self.rows),
            "start": job.latents,
        }
        if job.guidance is not None:
            arrays["guidance"] = np.array([job.guidance], np.float32)
            arrays["rescale"] = np.array([job.rescale], np.float32)
        if job.noise_samples is not None:
            arrays["draws"] = job.noise_samples
        for number, control in enumerate(job.controls):
            arrays[f"scales_{number}"] = np.array([*control.scales, 0.0])
        if job.channels is not None:
            arrays["channels"] = job.channels
        if (blend := job.blend) is not None:
            arrays |= {"picture": blend.image, "picture_noise": blend.noise, "mask": blend.mask}
            arrays |= {"kept_picture": blend.image_factors, "kept_noise": blend.noise_factors}
        dtypes = {"slots": np.bool_, "drawn": np.int64}
        return {name: np.ascontiguousarray(array, dtypes.get(name, np.float32)) for name, array in arrays.items()}

    def _bind_time_graph(self, values: dict[str, Any], graphs: BoundDenoiserGraphs, steps: int) -> dict[str, np.dtype]:
        """Bind the time graph for the rows of all steps; return the U-Net's inputs that change with the step."""
        sessions, name = self.sessions, graphs.parts["time"]
        model = sessions.models[name]

        def repeat(values: dict[str, Any]) -> dict[str, Any]:
            if not values:
                return {}
            row = sessions.value(np.tile(np.arange(self.rows), steps))
            rows = {identifier(name): value for name, value in values.items()} | {"row": row}
            dtypes = tuple((name, np.dtype(model.dtype(name))) for name in values)
            repeated = sessions.graph(sampling_graphs.repeat_rows_graph, dtypes, rows)
            self.per_image.append(repeated)
            return {name: repeated.outputs[f"every_{identifier(name)}"] for name in values}

        self.time_dtype = model.dtype("timestep")
        self.time_input = sessions.value(self.arrays["rows_timesteps"].astype(self.time_dtype))
        outputs = graphs.time_outputs(values, self.time_input, repeat)
        (self.per_image if len(model.inputs) > 1 else self.per_schedule).append(graphs.runs[name])
        self.values["place"] = sessions.value(np.arange(steps * self.rows).reshape(steps, self.rows))
        step_inputs = {}
        for output in model.session.get_outputs():
            every = outputs[output.name]
            step_inputs[output.name] = np.dtype(DTYPES[output.type])
            if output.name not in values:
                values[output.name] = sessions.empty([self.rows, *every.shape()[1:]], step_inputs[output.name])
            self.values[f"every_{identifier(output.name)}"] = every
            self.values[identifier(output.name)] = values[output.name]
        return step_inputs

    def write(self, job: SamplingJob) -> list[BoundRun]:
        """Copy the arrays of a job that differ from the last ones to the device; return what has to run after that."""
        arrays, outdated = self._arrays(job), self.is_outdated
        for name, array in arrays.items():
            if name in self.values and not np.array_equal(array, self.arrays[name]):
                write_value(self.values[name], array)
                if name == "rows_timesteps" and self.time_input is not None:
                    write_value(self.time_input, array.astype(self.time_dtype))
                    outdated = True
        self.arrays, self.is_outdated = arrays, False
        return self.per_schedule if outdated else []


def schedule_tables(schedule: LinearSchedule, guidance: float | None) -> dict[str, np.ndarray]:
    """Return the tables that `scheduler_step_graph` reads of a schedule of T steps, with T + 1 rows.

    Row 0 is of the graph before the first step and is not used. With `guidance` each prediction has two factors, the
    negative prompt's and the positive one's.
    """
    count, window = schedule.coefficients.shape[:2]
    latents, prediction = np.moveaxis(schedule.coefficients.astype(np.float64), 2, 0)
    sides = [prediction] if guidance is None else [prediction * (1 - guidance), prediction * guidance]
    factors = np.stack([latents, *sides], 2)
    steps, back = np.mgrid[:count, :window]
    slot = (steps - back) % window
    weights = np.zeros((count + 1, *factors.shape[1:]))
    weights[steps + 1, slot] = factors
    tables = {"weights": weights.reshape(count + 1, -1)}
    if window > 1:
        tables["slots"] = np.zeros((count + 1, window), np.bool_)
        tables["slots"][steps[:, 0] + 1, slot[:, 0]] = True
    if schedule.noise_count:
        most = max(1, int((schedule.noise_coefficients != 0).sum(1).max()))
        order = np.argsort(schedule.noise_coefficients == 0, 1, kind="stable")  # samples that a step uses come first
        indices = order[:, :most]
        tables["drawn"] = np.concatenate([indices[:1], indices])
        used = np.take_along_axis(schedule.noise_coefficients, indices, 1)
        tables["drawn_weights"] = np.concatenate([np.zeros_like(used[:1]), used])
        if window == 1:
            tables["weights"] = np.concatenate([tables["weights"], tables.pop("drawn_weights")], 1)
    return tables
