"""The sampling loop on a device: from token ids to the image's bytes nothing is copied to the host.

All components read and write buffers at fixed addresses, each the next one's input, and all sessions share one stream.
Guidance, the scheduler (`checkpoints.linear_schedule`) and the next sample are one small ONNX graph after each U-Net
call (`graphs.sampling_graphs`); the step's number is on the device too. So a step is two calls without arguments, the
U-Net's mostly the replay of a GPU graph, all steps are queued at once, and the host waits for the image alone.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sd_ort.core.errors import SdOrtError
from sd_ort.core.pipeline_folder import DEEP_FEATURES
from sd_ort.core.progress import step_bar
from sd_ort.graphs import sampling_graphs
from sd_ort.pipelines.device.conditioning import DeviceConditioning
from sd_ort.pipelines.device.controlnet import DeviceControlNets
from sd_ort.pipelines.device.schedule import DeviceSchedule
from sd_ort.pipelines.device.sessions import BoundDenoiserGraphs, DeviceSessions
from sd_ort.pipelines.sampling_job import SamplingJob, StepStage, check_finite
from sd_ort.runtime.ort_values import read_value
from sd_ort.runtime.session import DTYPES

if TYPE_CHECKING:
    from sd_ort.pipelines.device.band_unet import BandUnet
    from sd_ort.pipelines.partial_steps import ShallowSteps
    from sd_ort.runtime.bound_run import BoundRun
    from sd_ort.runtime.components import Components
    from sd_ort.runtime.stream import Stream


class DeviceLoop:
    """Runs all steps of a linear schedule, on a GPU or, for tests, on the host.

    `buffer_cache`: buffers and GPU graphs of the last `MAX_CACHED` kinds of job (sizes, number of rows, conditioning).
    `step_seconds`: mean seconds of the last image's steps on the device.
    """

    MAX_CACHED = 4

    def __init__(self, models: Components) -> None:
        """Open nothing yet."""
        self.models = models
        self.sessions = DeviceSessions(models)
        self.step_seconds: float | None = None
        self.buffer_cache: OrderedDict[Any, SamplingBuffers] = OrderedDict()

    @property
    def wait(self) -> bool:
        """Whether every call waits for the device."""
        return self.sessions.wait

    @wait.setter
    def wait(self, value: bool) -> None:
        self.sessions.wait = value

    def run(self, job: SamplingJob) -> np.ndarray:
        """Return latents (B, C, h, w) float32 after the last step or, with `decode`, images (B, H, W, 3) uint8.

        Images that do not fit in memory are not decoded.

        One thread samples at a time. Raises SdOrtError when ONNX Runtime fails, and for results that are not finite,
        with the component's name.
        """
        with self.models.lock:
            buffers = self.buffers(job)
            try:
                buffers.begin(job)
                image, self.step_seconds = buffers.finish(job, buffers.stages)
                return image
            finally:
                if self.models.low_memory:
                    self.buffer_cache.clear()

    def buffers(self, job: SamplingJob) -> SamplingBuffers:
        """Return the buffers for a job's shapes. The least recently used ones are released."""
        conditioning = tuple((name, value.shape) for name, value in sorted(job.conditioning.items()))
        channels = None if job.channels is None else job.channels.shape
        controls = tuple((control.name, control.image.shape) for control in job.controls)
        texts = None if job.texts is None else job.texts.shape
        models = [id(self.models[name]) for name in (job.unet, *(job.texts.ids if job.texts else ()))]
        if job.shallow_steps is not None:
            models.append(id(job.shallow_steps.open_model()))
        if job.band is not None:
            models.append(id(job.band.open_model()))
        key = (*models, job.latents.shape, job.rows, job.side, conditioning, texts, channels, controls)
        buffers = self.buffer_cache.pop(key, None)
        if buffers is None:
            if len(self.buffer_cache) == self.MAX_CACHED:
                self.buffer_cache.popitem(last=False)[1].release()
            buffers = SamplingBuffers(self.sessions, job)
        self.buffer_cache[key] = buffers
        return buffers

    def on_weights_updated(self) -> None:
        """Compute the time embeddings of schedules again for the next image: weights were updated in place."""
        for buffers in self.buffer_cache.values():
            if buffers.schedule is not None:
                buffers.schedule.is_outdated = True

    @property
    def buffer_bytes(self) -> int:
        """Device memory of the cached buffers, without the components' weights, workspaces and GPU graphs."""
        values = [value for buffers in self.buffer_cache.values() for value in buffers.device_values()]
        sizes = {
            value.data_ptr(): math.prod(value.shape()) * np.dtype(DTYPES[value.data_type()]).itemsize
            for value in values
        }
        return sum(sizes.values())


class CachedUnet:
    """The U-Net of a step: the full graph, or the shallow one over the deep features that the last full step wrote."""

    def __init__(
        self, sessions: DeviceSessions, full: BoundRun, steps: ShallowSteps, values: Mapping[str, Any]
    ) -> None:
        """Bind the shallow graph; it writes the prediction to the full one's buffer."""
        features = {DEEP_FEATURES: full.outputs[DEEP_FEATURES]}
        prediction = {"out_sample": full.outputs["out_sample"]}
        self.full, self.shallow = full, sessions.bind(steps.open_model(), {**values, **features}, prediction)
        self.begin(steps)

    def begin(self, steps: ShallowSteps) -> None:
        """Begin an image: its first step is a full one."""
        self.steps, self.index = steps, 0

    def run(self, wait: bool = True) -> None:
        """Run the next step's graph; without `wait`, only enqueue it."""
        is_full, self.index = self.steps.is_full(self.index), self.index + 1
        (self.full if is_full else self.shallow).run(wait)


class SamplingBuffers:
    """The components over buffers of one set of shapes, for any schedule."""

    def __init__(self, sessions: DeviceSessions, job: SamplingJob) -> None:
        self.sessions = sessions
        models, unet = sessions.models, sessions.models[job.unet]
        self.conditioning = DeviceConditioning(sessions, job)
        self.values: dict[str, Any] = {}  # inputs of the U-Net by name, and the latents
        self.graphs = BoundDenoiserGraphs(sessions)
        if self.graphs.is_hoisted:
            prompt = models[self.graphs.parts["prompt"]]
            self.values |= self.graphs.prompt_outputs(self.conditioning.inputs_of(prompt))
        shape = list(job.latents.shape)
        shape[1] += 0 if job.channels is None else job.channels.shape[1]
        self.values["sample"] = sessions.value(np.zeros((job.rows, *shape[1:]), unet.dtype("sample")))
        denoisers = [unet, *(models[control.name] for control in job.controls)]
        self.timestep = next((model.one("timestep") for model in denoisers if "timestep" in model.inputs), None)
        if self.timestep is not None:
            self.values["timestep"] = sessions.value(self.timestep)
        self.values = self.conditioning.inputs_of(unet) | self.values
        self.values["latents"] = sessions.value(np.zeros_like(job.latents))
        self.controls = DeviceControlNets(sessions, job, self.conditioning, self.values, self.timestep)
        self.unet: BoundRun | None = None
        self.cached_unet: CachedUnet | None = None
        self.band_unet: BandUnet | None = None
        self.schedule: DeviceSchedule | None = None
        self.schedule_key: Any = None
        self.stages: list[StepStage] = []  # what runs in a step
        self.decoders: dict[bool, list[BoundRun]] = {}

    def device_values(self) -> list[Any]:
        """Return all OrtValues on the device."""
        schedule = {} if self.schedule is None else self.schedule.values
        outputs = [value for runs in self.decoders.values() for run in runs for value in run.outputs.values()]
        return [*self.conditioning.values(), *self.values.values(), *schedule.values(), *outputs]

    def release(self) -> None:
        """Free the GPU graphs."""
        self._release_schedule()
        shallow = None if self.cached_unet is None else self.cached_unet.shallow
        for run in (*self.controls.nets, self.band_unet or self.unet, shallow):
            if run is not None:
                run.release()
        if self.conditioning.texts is not None:
            self.conditioning.texts.release()

    def _release_schedule(self) -> None:
        if self.schedule is not None:
            self.schedule.step.release()
            self.schedule = None

    def begin(self, job: SamplingJob) -> DeviceSchedule:
        """Copy the arrays of a job to the device and queue the graphs before its first step.

        Nothing is copied once something is queued: the copy would wait for it.
        """
        self.conditioning.write(job)
        self.controls.write(job)
        schedule = self._schedule_for(job)
        if self.cached_unet is not None and job.shallow_steps is not None:
            self.cached_unet.begin(job.shallow_steps)
        if self.band_unet is not None and job.band is not None:
            self.band_unet.begin(job.band)
        texts = self.conditioning.texts
        for run in (*(texts.runs if texts else ()), *schedule.write(job), *schedule.per_image):
            run.run(self.sessions.wait)
        return schedule

    def finish(self, job: SamplingJob, stages: Sequence[StepStage]) -> tuple[np.ndarray, float]:
        """Run all steps, each of them `stages` in turn, and then the decoder.

        Returns the result as `DeviceLoop.run`, and the mean seconds of a step.
        """
        if job.decode is not None and not job.fits():
            job = replace(job, decode=None)
        *runs, last = self._decoder(job.decode)
        wait, stream, count = self.sessions.wait, self.sessions.models.stream, len(job.schedule.timesteps)
        with step_bar(range(count), job.progress) as bar:
            if stream is None:
                started = time.perf_counter()
                for _ in bar:
                    for stage in stages:
                        stage.run(wait)
                step_seconds = (time.perf_counter() - started) / count
            else:
                self._queue(stages, stream, count, job.progress)
            for run in runs:
                run.run(wait)
            if stream is not None and job.progress:
                for number in range(count):  # all steps are queued: this only moves the bar
                    stream.wait(number + 1)
                    bar.update()
        last.run()
        if stream is not None:
            step_seconds = stream.seconds(0, count) / count
        return self._read(job, [*runs, last]), step_seconds

    def _queue(self, stages: Sequence[StepStage], stream: Stream, count: int, progress: bool) -> None:
        """Queue all steps, with an event before and after them and, to show `progress`, after each."""
        stream.reserve(count + 1)
        stream.record(0)
        for number in range(count):
            for stage in stages:
                stage.run(self.sessions.wait)
            if progress or number + 1 == count:
                stream.record(number + 1)

    def _schedule_for(self, job: SamplingJob) -> DeviceSchedule:
        """Return the buffers for a job's numbers of steps, noise samples and inputs."""
        schedule, flags = job.schedule, (bool(job.rescale), job.blend is not None)
        noise_samples = int((schedule.noise_coefficients != 0).sum(1).max(initial=0))
        key = (
            schedule.coefficients.shape,
            noise_samples,
            schedule.noise_count,
            bool((schedule.input_scales != 1).any()),
            *flags,
        )
        if self.schedule is None or self.schedule_key != key:
            self._release_schedule()  # the old buffers go before the new ones come
            scales = tuple(self.controls.scale_dtypes)
            new = DeviceSchedule(self.sessions, job, self.values, self.timestep, self.graphs, scales)
            if self.unet is None and job.band is not None:
                from sd_ort.pipelines.device.band_unet import BandUnet  # onnx_ir, which other loops do without

                self.band_unet = BandUnet(self.sessions, job.band, self.sessions.models[job.unet], self.values)
                self.unet = self.band_unet.full[0]
            elif self.unet is None:
                self.unet = self.sessions.bind(self.sessions.models[job.unet], self.values)
                if job.shallow_steps is not None:
                    self.cached_unet = CachedUnet(self.sessions, self.unet, job.shallow_steps, self.values)
            new.bind_step(self.unet, job.side)
            self.schedule, self.schedule_key = new, key
            self.stages = [*self.controls.runs, self.band_unet or self.cached_unet or self.unet, new.step]
        return self.schedule

    def _decoder(self, decode: tuple[np.ndarray, np.ndarray] | None) -> list[BoundRun]:
        """Return what follows the last step: the latents' scale and, for images, the VAE decoder and its bytes."""
        images = decode is not None
        if images not in self.decoders:
            sessions = self.sessions
            factor, mean = decode or (np.ones((1, 1, 1, 1), np.float32), np.zeros((1, 1, 1, 1), np.float32))
            values = {"latents": self.values["latents"], "factor": sessions.value(factor), "mean": sessions.value(mean)}
            vae = sessions.models["vae_decoder"] if images else None
            dtype = np.dtype(np.float32 if vae is None else vae.dtype("latent_sample"))
            runs = [sessions.graph(sampling_graphs.unscale_latents_graph, dtype, values)]
            if vae is not None:
                runs.append(sessions.bind(vae, {"latent_sample": runs[0].outputs["latent_sample"]}))
                sample = runs[1].outputs["sample"]
                output_type = next(o.type for o in vae.session.get_outputs() if o.name == "sample")
                dtype = np.dtype(DTYPES[output_type])
                runs.append(sessions.graph(sampling_graphs.to_uint8_graph, dtype, {"sample": sample}))
            self.decoders[images] = runs
        return self.decoders[images]

    def _read(self, job: SamplingJob, runs: list[BoundRun]) -> np.ndarray:
        """Return latents or images after checks.

        One check is that every step was taken: a provider that copies buffers would sample from their first contents.
        """
        assert self.schedule is not None
        steps, expected = int(read_value(self.schedule.values["index"])[0]), len(job.schedule.timesteps)
        if steps != expected:
            raise SdOrtError(
                f"the loop on the device took {steps} steps of {expected}: its kernels did nothing, as under `simulate "
                "--kernels skip`, which generates no images, or its buffers were copied. Without simulate, load the "
                "pipeline with device_loop=False, and report this."
            )
        if self.conditioning.texts is not None:
            self.conditioning.texts.check()
        check_finite(read_value(runs[0].outputs["latents_check"]), "unet")
        if job.decode is None:
            result = read_value(self.values["latents"])
        else:
            check_finite(read_value(runs[-1].outputs["image_check"]), "vae_decoder")
            result = read_value(runs[-1].outputs["image"])
        return result.copy() if self.sessions.models.device == "cpu" else result  # on a CPU it is a view of the buffer
