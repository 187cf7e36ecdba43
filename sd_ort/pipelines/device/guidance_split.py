"""Guidance split: two devices each predict one half of classifier-free guidance for one image.

The first device predicts for the negative prompt, the second for the positive one, at the same time. Then each sends
its prediction to the other, one exchange a step, and both take the same step of the scheduler: so no latents are sent,
and the next predictions start at once. The host waits for nothing; a device waits for the other by events:

    device 0   UNet (negative) ── send ──╮  ╭── wait ── step ── UNet ...
    device 1   UNet (positive) ── send ──╯──╰── wait ── step ── UNet ...

Before it sends a prediction, a device waits for the other's last step, which reads the one before.
On a CPU the devices are two groups of threads.
"""

from __future__ import annotations

import concurrent.futures
import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from sd_ort.graphs.sampling_graphs import GUIDANCE_HALVES
from sd_ort.pipelines.device.loop import DeviceLoop, SamplingBuffers
from sd_ort.runtime.ort_values import read_value, write_value
from sd_ort.runtime.partitioned import is_captured
from sd_ort.runtime.providers import warn_once
from sd_ort.runtime.session import DTYPES

if TYPE_CHECKING:
    from sd_ort.pipelines.sampling_job import SamplingJob
    from sd_ort.runtime.components import Components
    from sd_ort.runtime.stream import Stream


class SplitGuidanceLoop(DeviceLoop):
    """A device loop whose second half of guidance is predicted on another device."""

    def __init__(self, models: Components, peer: Components) -> None:
        super().__init__(models)
        self.other = DeviceLoop(peer)
        self.pool = ThreadPoolExecutor(len(GUIDANCE_HALVES), "guidance")
        self.turn = threading.Lock()
        self.events = [Events(loop.models.stream) for loop in (self, self.other)]

    def run(self, job: SamplingJob) -> np.ndarray:
        """As `DeviceLoop.run`. A job without guidance runs on the first device alone, with a warning."""
        if job.guidance is None:
            warn_once("without guidance there is nothing to split: one device generates.")
            return super().run(job)
        self.other.wait = self.wait
        with self.turn, self.other.models.lock, self.models.lock:
            first, second = (job.half(side) for side in GUIDANCE_HALVES)
            with self.other.models.lock:  # which makes its device the current one
                other_buffers = self.other.buffers(second)
                other_buffers.begin(second)
            with self.models.lock:
                buffers = self.buffers(first)
                buffers.begin(first)
                pairs = zip((buffers, other_buffers), self.events, strict=True)
                sides = [GuidanceHalf(each, events) for each, events in pairs]
                # A captured graph is its thread's own: in another one ONNX Runtime would capture it again. Replays are
                # queued so quickly that one thread keeps both devices busy.
                pool = None if is_captured(self.models["unet"]) else self.pool
                image, self.step_seconds = buffers.finish(first, [SplitGuidanceStep(sides, pool)])
                return image

    def on_weights_updated(self) -> None:
        super().on_weights_updated()
        self.other.on_weights_updated()

    @property
    def buffer_bytes(self) -> int:
        """As `DeviceLoop.buffer_bytes`, on both devices."""
        return super().buffer_bytes + self.other.buffer_bytes


class Events:
    """Events of one device: its prediction is sent, and it has taken a step."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream
        if stream is not None:
            self.sent, self.stepped = stream.event(), stream.event()


class GuidanceHalf:
    """One half of classifier-free guidance on its device."""

    def __init__(self, buffers: SamplingBuffers, events: Events) -> None:
        assert buffers.schedule is not None
        self.schedule, self.events, self.stream = buffers.schedule, events, events.stream
        self.predictors = buffers.stages[:-1]  # all but the step's graph
        self.noise, self.received = self.schedule.noise, self.schedule.received
        dtype = np.dtype(DTYPES[self.noise.data_type()])
        self.prediction_bytes = math.prod(self.noise.shape()) * dtype.itemsize

    def predict(self, other: GuidanceHalf, wait: bool) -> None:
        """Predict, and send the prediction to the other device."""
        if self.stream is not None:
            self.stream.set_device()
        for stage in self.predictors:
            stage.run(wait)
        self.send(other)

    def send(self, other: GuidanceHalf) -> None:
        """Send the prediction to the other device."""
        if self.stream is None:
            write_value(other.received, read_value(self.noise))
            return
        self.stream.set_device()
        assert other.stream is not None
        self.stream.wait_event(other.events.stepped)
        self.stream.copy_to_peer(self.noise.data_ptr(), other.stream, other.received.data_ptr(), self.prediction_bytes)
        self.stream.record_event(self.events.sent)

    def step(self, other: GuidanceHalf, wait: bool) -> None:
        """Take the scheduler's step with both predictions."""
        if self.stream is not None:
            self.stream.set_device()
            self.stream.wait_event(other.events.sent)
        self.schedule.step.run(wait)
        if self.stream is not None:
            self.stream.record_event(self.events.stepped)


class SplitGuidanceStep:
    """One step on two devices. `pool`: threads in which both predict at once; None to queue one after the other."""

    def __init__(self, sides: Sequence[GuidanceHalf], pool: ThreadPoolExecutor | None) -> None:
        self.sides, self.pool = sides, pool

    def run(self, wait: bool = True) -> None:
        """Run, or queue without `wait`. Raises SdOrtError when ONNX Runtime fails on either side."""
        others = self.sides[::-1]
        if self.pool is None:
            for side, other in zip(self.sides, others, strict=True):
                side.predict(other, wait)
        else:
            pairs = zip(self.sides, others, strict=True)
            predictions = [self.pool.submit(side.predict, other, wait) for side, other in pairs]
            concurrent.futures.wait(predictions)  # for both, also when one fails
            for prediction in predictions:
                prediction.result()
        for side, other in zip(self.sides, others, strict=True):
            side.step(other, wait)
        if self.sides[0].stream is not None:
            self.sides[0].stream.set_device()
