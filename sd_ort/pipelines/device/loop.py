"""Drawing on the device: from the prompt's embeddings to the bytes of the picture nothing is copied to the host.

All components read and write buffers with fixed addresses, each the next one's input, and all sessions share one
stream. Guidance, the scheduler (a table, see `family.schedule`) and the next step's input are one small ONNX graph
between two UNet calls (`graphs.sampling_graphs`); the step's number lies on the device too. So a step is two calls
without arguments, the UNet's mostly the replay of a captured graph, all steps are queued at once, and the host waits
for the picture alone.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sd_ort.core.errors import InputError, SdOrtError
from sd_ort.core.progress import step_bar
from sd_ort.graphs import sampling_graphs
from sd_ort.pipelines.device.controlnet import ControlNets
from sd_ort.pipelines.device.schedule import Steps
from sd_ort.pipelines.device.text_encoders import DeviceTextEncoders
from sd_ort.pipelines.sampling_job import Arrays, SamplingJob, StepStage, check_finite
from sd_ort.runtime.bound_run import NO_GRAPH_ID, BoundRun, bind
from sd_ort.runtime.ort_values import device_value, empty_value, read_value, write_value
from sd_ort.runtime.partitioned import PartitionedModel, is_captured
from sd_ort.runtime.session import DTYPES, open_graph

if TYPE_CHECKING:
    from sd_ort.runtime.components import Components
    from sd_ort.runtime.session import Model
    from sd_ort.runtime.stream import Stream


class DeviceLoop:
    """Runs all steps of a linear schedule, on a GPU or, to test it, on the host.

    Buffers and captured graphs of the last `KEPT` kinds of drawing (sizes, number of rows, conditioning) are kept.
    """

    KEPT = 4

    def __init__(self, models: Components) -> None:
        """Nothing is opened yet."""
        self.models = models
        self.wait = False  # for every call; a session that reads inputs on the host requires it
        self.step_seconds: float | None = None  # of the last drawing, on the device: its steps' mean
        self.kept: OrderedDict[Any, Buffers] = OrderedDict()
        self.graphs: dict[Any, Any] = {}
        self.captured = itertools.count()

    def run(self, drawing: SamplingJob) -> np.ndarray:
        """Latents (B, C, h, w) float32 as the last step leaves them, or with `decode` pictures (B, H, W, 3) uint8.

        One thread draws at a time. Raises SdOrtError for numbers that are not finite, naming the component that made
        them, and when ONNX Runtime fails.
        """
        with self.models.lock:
            buffers = self.buffers(drawing)
            try:
                return buffers.finish(drawing, buffers.begin(drawing).every)
            finally:
                if self.models.low_memory:
                    self.kept.clear()

    def buffers(self, drawing: SamplingJob) -> Buffers:
        """Those of a kind of drawing."""
        conditioning = tuple((name, value.shape) for name, value in sorted(drawing.conditioning.items()))
        channels = None if drawing.channels is None else drawing.channels.shape
        controls = tuple((control.name, control.image.shape) for control in drawing.controls)
        shape = drawing.latents.shape, drawing.rows, drawing.side
        texts = None if drawing.texts is None else drawing.texts.shape
        opened = [id(self.models[name]) for name in ("unet", *(drawing.texts.ids if drawing.texts else ()))]
        key = (*opened, *shape, conditioning, texts, channels, controls)
        buffers = self.kept.pop(key, None)
        if buffers is None:
            if len(self.kept) == self.KEPT:
                self.kept.popitem(last=False)[1].release()
            buffers = Buffers(self, drawing)
        self.kept[key] = buffers
        return buffers

    def on_weights_updated(self) -> None:
        """After an update of weights in place: the next image computes the time embeddings of its schedule again."""
        for buffers in self.kept.values():
            if buffers.steps is not None:
                buffers.steps[1].is_outdated = True

    @property
    def held_bytes(self) -> int:
        """Memory on the device of the buffers that are kept, at most `KEPT` kinds of drawing; a component's own memory
        and that of its captured graph come on top."""
        every = [value for buffers in self.kept.values() for value in buffers.held()]
        sizes = {
            value.data_ptr(): math.prod(value.shape()) * np.dtype(DTYPES[value.data_type()]).itemsize for value in every
        }
        return sum(sizes.values())

    def value(self, array: Any) -> Any:
        """An array on the device."""
        return device_value(array, self.models.device)

    def empty(self, shape: Any, dtype: Any) -> Any:
        """Memory on the device."""
        return empty_value(shape, dtype, self.models.device)

    def bind(self, model: Model, feed: Mapping[str, Any], outputs: Mapping[str, Any] | None = None) -> BoundRun:
        """A component over buffers, captured where its session captures."""
        feed = {name: feed[name] for name in model.inputs}
        if isinstance(model, PartitionedModel):
            bound: BoundRun = model.bind(feed)
        else:
            bound = bind(model, feed, self.models.device, outputs)
        self.wait |= bool(bound.host_inputs)
        return bound

    def graph(
        self, make: Callable[[Any], bytes], key: Any, values: Mapping[str, Any], *, capture: bool = False
    ) -> BoundRun:
        """The small graph `make(key)` over buffers; its session is opened once. `capture`: it is replayed, as the UNet
        is, for its kernels take less time than the gaps between their launches."""
        name = (make.__name__, key, capture)
        if name not in self.graphs:
            options = self.models.options["provider_options"]
            kept = {k: v for k, v in options.items() if k in ("device_id", "user_compute_stream")}
            provider = "cpu" if self.models.device == "cpu" else self.models.provider
            self.graphs[name] = open_graph(make(key), provider, kept, capture=capture)
        session = self.graphs[name]
        read = {value.name: values[value.name] for value in session.get_inputs()}
        written = {v.name: values[v.name] for v in session.get_outputs() if v.name in values}
        stream = self.models.capture_stream if capture else None
        graph_id = next(self.captured) if capture and stream is None else NO_GRAPH_ID
        return BoundRun(session, read, self.models.device, stream=stream, graph_id=graph_id, outputs=written)

    def repeated(self, make: Callable[[Any], bytes], key: Any, values: Mapping[str, Any]) -> BoundRun:
        """As `graph`, captured if the UNet is."""
        return self.graph(make, key, values, capture=is_captured(self.models["unet"]))


class Buffers:
    """The components over the buffers of one kind of drawing, whatever its schedule."""

    def __init__(self, loop: DeviceLoop, drawing: SamplingJob) -> None:
        self.loop = loop
        unet = loop.models["unet"]
        self.texts = None if drawing.texts is None else DeviceTextEncoders(loop, drawing.texts)
        self.given: dict[tuple[str, np.dtype], Any] = {}
        self.values: dict[str, Any] = {}
        if "unet_prompt" in loop.models:
            model = loop.models["unet_prompt"]
            feed = {name: self.give(name, drawing.conditioning, model.dtype(name)) for name in model.inputs}
            self.prompt: BoundRun | None = loop.bind(model, feed)
            self.values |= self.prompt.outputs
        else:
            self.prompt = None
        shape = list(drawing.latents.shape)
        shape[1] += 0 if drawing.channels is None else drawing.channels.shape[1]
        sample = np.zeros((drawing.rows, *shape[1:]), unet.dtype("sample"))
        self.values["sample"] = loop.value(sample)
        timed = [unet, *(loop.models[control.name] for control in drawing.controls)]
        self.timestep = next((model.one("timestep") for model in timed if "timestep" in model.inputs), None)
        if self.timestep is not None:
            self.values["timestep"] = loop.value(self.timestep)
        for name in unet.inputs:
            if name not in self.values and self.is_conditioning(name, drawing.conditioning):
                self.values[name] = self.give(name, drawing.conditioning, unet.dtype(name))
        self.values["latents"] = loop.value(np.zeros_like(drawing.latents))
        self.controls = ControlNets(self, drawing)
        self.steps: tuple[Any, Steps] | None = None
        self.unet: BoundRun | None = None
        self.ends: dict[bool, list[BoundRun]] = {}

    def is_conditioning(self, name: str, conditioning: Arrays) -> bool:
        """Whether an input of the UNet says something about the prompts."""
        return name in conditioning or (self.texts is not None and name in self.texts)

    def give(self, name: str, conditioning: Arrays, dtype: Any) -> Any:
        """A conditioning input on the device: made there by the text encoders, or a copy, which every drawing renews.
        Raises InputError without one."""
        if self.texts is not None and name in self.texts:
            return self.texts.rows(name, dtype)
        if name not in conditioning:
            raise InputError(f"the UNet reads {name}, which this pipeline does not give: export it with sd-ort.")
        key = name, np.dtype(dtype)
        if key not in self.given:
            self.given[key] = self.loop.value(conditioning[name].astype(dtype))
        return self.given[key]

    def held(self) -> list[Any]:
        """All values on the device."""
        steps = {} if self.steps is None else self.steps[1].values
        ends = [value for part in self.ends.values() for bound in part for value in bound.outputs.values()]
        texts = [] if self.texts is None else self.texts.held()
        return [*texts, *self.given.values(), *self.values.values(), *steps.values(), *ends]

    def release(self) -> None:
        """Give the captured graphs back."""
        self._release_steps()
        for bound in (*self.controls.nets, *([] if self.unet is None else [self.unet])):
            bound.release()
        if self.texts is not None:
            self.texts.release()

    def _release_steps(self) -> None:
        if self.steps is not None:
            self.steps[1].between.release()
            self.steps = None

    def begin(self, drawing: SamplingJob) -> Steps:
        """Give the device what this drawing has of its own, and queue what runs before its first step.

        Nothing is copied once something is queued: the copy would wait for it.
        """
        for (name, dtype), value in self.given.items():
            write_value(value, np.asarray(drawing.conditioning[name], dtype))
        self.controls.give(drawing)
        steps = self._steps(drawing)
        texts = []
        if self.texts is not None and drawing.texts is not None:
            self.texts.give(drawing.texts)
            texts = self.texts.parts
        for part in (*texts, *steps.give(drawing), *steps.before):
            part.run(self.loop.wait)
        return steps

    def finish(self, drawing: SamplingJob, every: Sequence[StepStage]) -> np.ndarray:
        """Run all steps, each the parts `every` in turn, and what follows them. Returns as `DeviceLoop.run`."""
        *ends, last = self._ends(drawing.decode)
        wait, stream, count = self.loop.wait, self.loop.models.stream, len(drawing.schedule.timesteps)
        with step_bar(range(count), drawing.progress) as bar:
            if stream is None:
                started = time.perf_counter()
                for _ in bar:
                    for part in every:
                        part.run(wait)
                self.loop.step_seconds = (time.perf_counter() - started) / count
            else:
                self._queue(every, stream, count, wait, drawing.progress)
            for part in ends:
                part.run(wait)
            if stream is not None and drawing.progress:
                for number in range(count):  # all is queued: this only moves the bar
                    stream.wait(number + 1)
                    bar.update()
        last.run()
        if stream is not None:
            self.loop.step_seconds = stream.seconds(0, count) / count
        return self._read(drawing, [*ends, last])

    def _queue(self, every: Sequence[StepStage], stream: Stream, count: int, wait: bool, progress: bool) -> None:
        """All steps, an event before and behind them and, to show `progress`, one behind each."""
        stream.reserve(count + 1)
        stream.record(0)
        for number in range(count):
            for part in every:
                part.run(wait)
            if progress or number + 1 == count:
                stream.record(number + 1)

    def _steps(self, drawing: SamplingJob) -> Steps:
        """The buffers for as many steps, draws and inputs as this drawing has."""
        schedule, flags = drawing.schedule, (bool(drawing.rescale), drawing.kept is not None)
        drawn = int((schedule.noise_coefficients != 0).sum(1).max(initial=0))
        key = schedule.coefficients.shape, drawn, schedule.noise_count, bool((schedule.input_scales != 1).any()), *flags
        if self.steps is None or self.steps[0] != key:
            self._release_steps()  # the old buffers go before the new ones come
            self.steps = key, Steps(self, drawing)
        return self.steps[1]

    def _ends(self, decode: tuple[np.ndarray, np.ndarray] | None) -> list[BoundRun]:
        """What follows the last step: finish and, for pictures, the VAE decoder and its bytes."""
        pictures = decode is not None
        if pictures not in self.ends:
            loop = self.loop
            factor, mean = decode or (np.ones((1, 1, 1, 1), np.float32), np.zeros((1, 1, 1, 1), np.float32))
            values = {"latents": self.values["latents"], "factor": loop.value(factor), "mean": loop.value(mean)}
            vae = loop.models["vae_decoder"] if pictures else None
            dtype = np.dtype(np.float32 if vae is None else vae.dtype("latent_sample"))
            ends = [loop.graph(sampling_graphs.unscale_latents_graph, dtype, values)]
            if vae is not None:
                ends.append(loop.bind(vae, {"latent_sample": ends[0].outputs["latent_sample"]}))
                sample = ends[1].outputs["sample"]
                given = DTYPES[next(o.type for o in vae.session.get_outputs() if o.name == "sample")]
                ends.append(loop.graph(sampling_graphs.to_uint8_graph, np.dtype(given), {"sample": sample}))
            self.ends[pictures] = ends
        return self.ends[pictures]

    def _read(self, drawing: SamplingJob, ends: list[BoundRun]) -> np.ndarray:
        """Latents or pictures, once all is done; checked, and that every step was taken: a provider that copied the
        buffers instead of reading them would draw from what they held at first."""
        assert self.steps is not None
        taken, wanted = int(read_value(self.steps[1].values["index"])[0]), len(drawing.schedule.timesteps)
        if taken != wanted:
            problem = f"the loop on the device took {taken} steps of {wanted}, for its buffers were copied"
            raise SdOrtError(f"{problem}: load the pipeline with device_loop=False, and report this.")
        if self.texts is not None:
            self.texts.check()
        check_finite(read_value(ends[0].outputs["latents_check"]), "unet")
        if drawing.decode is None:
            made = read_value(self.values["latents"])
        else:
            check_finite(read_value(ends[-1].outputs["image_check"]), "vae_decoder")
            made = read_value(ends[-1].outputs["image"])
        return made.copy() if self.loop.models.device == "cpu" else made  # there it is a view of the buffer
