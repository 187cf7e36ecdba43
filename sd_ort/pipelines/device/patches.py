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
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sd_ort.graphs.patches import Band, compute_band, return_borders
from sd_ort.graphs.sampling_graphs import GUIDANCE_HALVES
from sd_ort.pipelines.device.guidance_split import Events, GuidanceHalf
from sd_ort.pipelines.device.loop import DeviceLoop, SamplingBuffers
from sd_ort.pipelines.partial_steps import BandSteps
from sd_ort.pipelines.patches import bands_of
from sd_ort.pipelines.step_cache import apply_edits
from sd_ort.runtime.partitioned import is_captured

if TYPE_CHECKING:
    import onnx_ir as ir

    from sd_ort.pipelines.sampling_job import SamplingJob
    from sd_ort.runtime.components import Components
    from sd_ort.runtime.session import OrtModel


class SplitImageLoop(DeviceLoop):
    """Sampling loop that computes one image on several devices."""

    def __init__(self, models: Components) -> None:
        super().__init__(models)
        self.loops = [self, *(DeviceLoop(peer) for peer in models.placement.peers)]
        self.pool = ThreadPoolExecutor(len(self.loops), "band")
        self.turn = threading.Lock()
        self.events = [(Events(loop.models.stream), Events(loop.models.stream)) for loop in self.loops]

    def run(self, job: SamplingJob) -> np.ndarray:
        """Run the loop and return the image, like `DeviceLoop.run`. Raises InputError like `patches.bands_of`."""
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
        """Return the job of one device with the graphs of its band."""
        label = f"band {band.index + 1} of {band.count}"
        key = models.edit("unet", f"whole image and {label}", partial(_edited, return_borders, band), captured=True)

        def open_model() -> OrtModel:
            return models.variant("unet", label, partial(_edited, compute_band, band), captured=True)

        return replace(job, unet=key, band=BandSteps(band.index, band.count, open_model))

    def on_weights_updated(self) -> None:
        for loop in self.loops:
            DeviceLoop.on_weights_updated(loop)

    @property
    def buffer_bytes(self) -> int:
        """Size of the buffers on all devices."""
        return super().buffer_bytes + sum(loop.buffer_bytes for loop in self.loops[1:])


def _edited(edit: Callable[[ir.Model, Band], None], band: Band, path: Path) -> bytes:
    def change(model: ir.Model, _: int) -> bool:
        edit(model, band)
        return True

    graph = apply_edits([("", change)], 1, path)
    assert graph is not None
    return graph


class PatchDevice:
    """One device of a split image, with events for: rows computed, rows sent, prediction sent, step finished."""

    def __init__(self, buffers: SamplingBuffers, job: SamplingJob, events: Events, guidance_events: Events) -> None:
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
            self.stream.record_event(self.events.stepped)

    def use(self) -> None:
        """Make this the current device."""
        if self.stream is not None:
            self.stream.set_device()

    def send(self, others: Sequence[PatchDevice]) -> None:
        """Copy rows to the devices of the other bands after these have read the previous ones."""
        self.use()
        for other in others:
            if self.stream is not None:
                self.stream.wait_event(other.events.stepped)
            for source, target in self.unet.copies_to(other.unet):
                assert source.size == target.size
                if self.stream is None:
                    ctypes.memmove(target.address, source.address, source.size)
                else:
                    assert other.stream is not None
                    self.stream.copy_to_peer(source.address, other.stream, target.address, source.size)
        if self.stream is not None:
            self.stream.record_event(self.events.sent)

    def join(self, others: Sequence[PatchDevice], wait: bool) -> None:
        """Join the predictions of all bands."""
        self.use()
        if self.stream is not None:
            for other in others:
                self.stream.wait_event(other.events.sent)
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
        if not self.devices[0].unet.is_full:
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
