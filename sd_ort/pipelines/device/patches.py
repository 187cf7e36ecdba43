"""One image on several devices: each computes a band of its rows in most steps (patch parallelism).

With classifier-free guidance half of the devices predict for the negative prompt, half for the positive one. The first
steps compute all rows on each device. Later ones compute a band from what the other bands offered in the step before
(`graphs.patches`). After each of these steps a device copies to every other one of its half what that reads next: its
halo rows, keys and values, which lie together in memory, so this is one copy, and its prediction. Then each device
joins the predictions and takes the same step of the scheduler on the whole image. What comes from other bands is
extrapolated from the last two steps to the next one.

    device 0   band 0 ── copy ──╮  ╭── wait ── join ── (guidance) ── step ── band 0 ...
    device 1   band 1 ── copy ──╯──╰── wait ── join ── (guidance) ── step ── band 1 ...

The host waits for nothing. On a CPU the devices are groups of threads.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sd_ort.graphs import sampling_graphs
from sd_ort.graphs.patches import Band, compute_band, inputs_from, offered, outputs_for, return_borders
from sd_ort.graphs.sampling_graphs import GUIDANCE_HALVES
from sd_ort.pipelines.device.guidance_split import Events, GuidanceHalf
from sd_ort.pipelines.device.loop import Buffers, DeviceLoop
from sd_ort.pipelines.patches import BandSteps, bands_of
from sd_ort.pipelines.step_cache import edited
from sd_ort.runtime.bound_run import BoundRun, GpuGraphModel
from sd_ort.runtime.ort_values import view
from sd_ort.runtime.partitioned import is_captured
from sd_ort.runtime.session import DTYPES

if TYPE_CHECKING:
    import onnx_ir as ir

    from sd_ort.pipelines.device.sessions import DeviceSessions
    from sd_ort.pipelines.sampling_job import SamplingJob
    from sd_ort.runtime.components import Components
    from sd_ort.runtime.session import Model

ALIGNMENT = 256  # bytes, of each value


class SplitImageLoop(DeviceLoop):
    """A device loop whose image is computed by several devices."""

    def __init__(self, models: Components) -> None:
        super().__init__(models)
        self.loops = [self, *(DeviceLoop(peer) for peer in models.peers)]
        self.pool = ThreadPoolExecutor(len(self.loops), "band")
        self.turn = threading.Lock()
        self.events = [(Events(loop.models.stream), Events(loop.models.stream)) for loop in self.loops]

    def run(self, job: SamplingJob) -> np.ndarray:
        """As `DeviceLoop.run`. Raises InputError as `patches.bands_of`."""
        bands = bands_of(self.models, job.guidance)
        with self.turn, ExitStack() as locks:
            for loop in self.loops[::-1]:
                loop.wait = self.wait
                locks.enter_context(loop.models.lock)
            devices: list[PatchDevice] = []
            for number, loop in reversed([*enumerate(self.loops)]):
                half = job if job.guidance is None else job.half(GUIDANCE_HALVES[number // bands])
                own = self._for_band(half, loop.models, Band(number % bands, bands))
                with loop.models.lock:  # which makes its device the current one
                    buffers = loop.buffers(own)
                    buffers.begin(own)
                devices.insert(0, PatchDevice(buffers, own, *self.events[number]))
            pool = None if is_captured(self.models[devices[0].job.unet]) else self.pool
            step = SplitImageStep(devices, pool)
            with self.models.lock:
                image, self.step_seconds = devices[0].buffers.finish(devices[0].job, [step])
                return image

    def _for_band(self, job: SamplingJob, models: Components, band: Band) -> SamplingJob:
        """Return the job of one device: with the graphs of its band."""
        label = f"band {band.index + 1} of {band.count}"
        key = models.edit("unet", f"whole image and {label}", partial(_edited, return_borders, band), captured=True)

        def open_model() -> Model:
            return models.variant("unet", label, partial(_edited, compute_band, band), captured=True)

        return replace(job, unet=key, band=BandSteps(band.index, band.count, open_model))

    def on_weights_updated(self) -> None:
        for loop in self.loops:
            DeviceLoop.on_weights_updated(loop)

    @property
    def buffer_bytes(self) -> int:
        """As `DeviceLoop.buffer_bytes`, on all devices."""
        return super().buffer_bytes + sum(loop.buffer_bytes for loop in self.loops[1:])


def _edited(edit: Callable[[ir.Model, Band], None], band: Band, path: Path) -> bytes:
    def change(model: ir.Model, _: int) -> bool:
        edit(model, band)
        return True

    graph = edited([("", change)], 1, path)
    assert graph is not None
    return graph


@dataclass(frozen=True)
class Span:
    """Consecutive memory on a device."""

    address: int
    size: int


class Arena:
    """OrtValues that lie one behind the other in device memory, each in the shape and dtype of another value."""

    def __init__(self, sessions: DeviceSessions, likes: Mapping[str, Any]) -> None:
        (dtype,) = {np.dtype(DTYPES[like.data_type()]) for like in likes.values()}
        self.dtype, self.ends = dtype, {}
        end = 0
        for name, like in likes.items():
            size = math.prod(like.shape()) * dtype.itemsize
            self.ends[name] = end, end + size
            end += -(-size // ALIGNMENT) * ALIGNMENT
        self.memory = sessions.value(np.zeros(end // dtype.itemsize, dtype))
        device = sessions.models.device
        self.values = {name: view(self.memory, self.ends[name][0], like, device) for name, like in likes.items()}

    def span(self, names: Sequence[str]) -> Span:
        """Return the memory of consecutive values."""
        start, end = self.ends[names[0]][0], self.ends[names[-1]][1]
        return Span(self.memory.data_ptr() + start, end - start)


class BandUnet:
    """The U-Net of a step on one device: the whole image's graph, or that of its band.

    `received`: what the other bands offered in the last two steps, by the parity of the step. The band's graph reads
    these extrapolated to its own step.
    """

    def __init__(self, sessions: DeviceSessions, steps: BandSteps, unet: Model, values: Mapping[str, Any]) -> None:
        """Bind both graphs. The whole image's also writes what other devices send in later steps."""
        self.band = band = Band(steps.index, steps.count)
        device, graph = sessions.models.device, partial(sessions.graph, capture=isinstance(unet, GpuGraphModel))
        likes = BoundRun(unet.session, {name: values[name] for name in unet.inputs}, device).outputs
        likes = {name: likes[name] for other in band.others for name in inputs_from(likes, band, other)}
        self.received = [Arena(sessions, likes) for _ in range(2)]
        read = Arena(sessions, likes)
        self.whole = [sessions.bind(unet, values, self.received[0].values)]
        shared = {name: value for name, value in self.whole[0].outputs.items() if name not in likes}
        self.whole.append(sessions.bind(unet, values, shared | self.received[1].values))
        self.extrapolate = [
            graph(
                sampling_graphs.extrapolate_graph,
                read.dtype,
                {"latest": latest.memory, "before": before.memory, "next": read.memory},
            )
            for latest, before in (self.received, self.received[::-1])
        ]
        prediction, sample = shared["out_sample"], values["sample"]
        dtype = np.dtype(DTYPES[sample.data_type()])
        self.cut = graph(sampling_graphs.band_graph, (dtype, band.index, band.count), {"sample": sample})
        model = steps.open_model()
        feed = {**values, **shared, **read.values, "sample": self.cut.outputs["band"]}
        likes = BoundRun(model.session, {name: feed[name] for name in model.inputs}, device).outputs
        self.offered = Arena(sessions, {name: likes[name] for name in offered(likes)})
        self.rows = sessions.bind(model, feed, self.offered.values)
        dtype = np.dtype(DTYPES[prediction.data_type()])
        rows = self.rows.outputs["out_sample"]
        self.bands = {other: sessions.empty(rows.shape(), dtype) for other in band.others} | {band.index: rows}
        parts = {f"band_{index}": value for index, value in self.bands.items()}
        self.join = graph(sampling_graphs.join_bands_graph, (dtype, band.count), {**parts, "joined": prediction})
        self.rows_size = math.prod(rows.shape()) * dtype.itemsize
        self.begin(steps)

    @property
    def outputs(self) -> Mapping[str, Any]:
        """Return the whole image's outputs."""
        return self.whole[0].outputs

    def begin(self, steps: BandSteps) -> None:
        """Begin an image: its first steps compute all rows."""
        self.steps, self.index, self.is_whole = steps, 0, True

    def run(self, wait: bool = True) -> None:
        """Compute the next step's rows, all of them or the band's; without `wait`, only enqueue it."""
        self.is_whole, self.parity, self.index = self.steps.is_whole(self.index), self.index % 2, self.index + 1
        if self.is_whole:
            self.whole[self.parity].run(wait)
            return
        for run in (self.extrapolate[1 - self.parity], self.cut, self.rows):
            run.run(wait)

    def copies_to(self, other: BandUnet) -> list[tuple[Span, Span]]:
        """Return the memory that another band reads after this step, here and there."""
        names, read = self.offered.values, other.received[self.parity]
        source = self.offered.span(outputs_for(names, self.band, other.band.index))
        target = read.span(inputs_from(read.values, other.band, self.band.index))
        rows = (each.bands[self.band.index].data_ptr() for each in (self, other))
        here, there = (Span(address, self.rows_size) for address in rows)
        return [(source, target), (here, there)]

    def release(self) -> None:
        """Free the GPU graphs."""
        for run in (*self.whole, *self.extrapolate, self.cut, self.rows, self.join):
            run.release()


class PatchDevice:
    """One device of an image, with its events: rows are computed and sent, a prediction is sent, a step taken."""

    def __init__(self, buffers: Buffers, job: SamplingJob, events: Events, guidance_events: Events) -> None:
        assert buffers.schedule is not None
        assert buffers.band_unet is not None
        self.buffers, self.job, self.events, self.stream = buffers, job, events, events.stream
        self.unet, self.schedule = buffers.band_unet, buffers.schedule
        self.guidance = None if job.side is None else GuidanceHalf(buffers, guidance_events)

    def compute(self, wait: bool) -> None:
        """Compute the next step's rows."""
        self.use()
        self.unet.run(wait)
        if self.stream is not None:
            self.stream.mark(self.events.stepped)

    def use(self) -> None:
        """Make this the current device."""
        if self.stream is not None:
            self.stream.use()

    def send(self, others: Sequence[PatchDevice]) -> None:
        """Copy to the other bands' devices what these read, once they have read what was there."""
        self.use()
        for other in others:
            if self.stream is not None:
                self.stream.follow(other.events.stepped)
            for source, target in self.unet.copies_to(other.unet):
                assert source.size == target.size
                if self.stream is None:
                    ctypes.memmove(target.address, source.address, source.size)
                else:
                    assert other.stream is not None
                    self.stream.send(source.address, other.stream, target.address, source.size)
        if self.stream is not None:
            self.stream.mark(self.events.sent)

    def join(self, others: Sequence[PatchDevice], wait: bool) -> None:
        """Join the predictions of all bands."""
        self.use()
        if self.stream is not None:
            for other in others:
                self.stream.follow(other.events.sent)
        self.unet.join.run(wait)


class SplitImageStep:
    """One step on all devices. `pool`: threads in which they compute at once; None to queue one after the other."""

    def __init__(self, devices: Sequence[PatchDevice], pool: ThreadPoolExecutor | None) -> None:
        self.devices, self.pool = devices, pool
        bands = devices[0].unet.band.count
        self.halves = [devices[start : start + bands] for start in range(0, len(devices), bands)]

    def run(self, wait: bool = True) -> None:
        """Run, or queue without `wait`. Raises SdOrtError when ONNX Runtime fails on a device."""
        if self.pool is None:
            for device in self.devices:
                device.compute(wait)
        else:
            for computed in [self.pool.submit(device.compute, wait) for device in self.devices]:
                computed.result()
        if not self.devices[0].unet.is_whole:
            others = [(one, [other for other in half if other is not one]) for half in self.halves for one in half]
            for device, peers in others:
                device.send(peers)
            for device, peers in others:
                device.join(peers, wait)
        if len(self.halves) == 2:
            pairs = [*zip(*self.halves, strict=True)]
            sides = [(one.guidance, other.guidance) for pair in pairs for one, other in (pair, pair[::-1])]
            for side, other in sides:
                assert side is not None
                assert other is not None
                side.send(other)
            for side, other in sides:
                assert side is not None
                assert other is not None
                side.step(other, wait)
        else:
            for device in self.devices:
                device.use()
                device.schedule.step.run(wait)
        self.devices[0].use()
