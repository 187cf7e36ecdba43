"""One image on two devices: each predicts one half of classifier-free guidance.

The first device predicts for the negative prompt, the second for the positive one, at the same time. Then each sends
its prediction to the other, one exchange a step, and both take the same step of the scheduler: so no latents are sent,
and the next predictions start at once. Nothing is waited for on the host; a device waits for the other by events:

    device 0   UNet (negative) ── send ──╮  ╭── wait ── between ── UNet ...
    device 1   UNet (positive) ── send ──╯──╰── wait ── between ── UNet ...

Between a prediction and its sending, a device waits for the other's last step, which read what the last exchange left.
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
from sd_ort.pipelines.device.loop import DeviceLoop
from sd_ort.runtime.ort_values import read_value, write_value
from sd_ort.runtime.partitioned import is_captured
from sd_ort.runtime.providers import warn_once
from sd_ort.runtime.session import DTYPES

if TYPE_CHECKING:
    from sd_ort.pipelines.device.schedule import Steps
    from sd_ort.pipelines.sampling_job import SamplingJob
    from sd_ort.runtime.components import Components
    from sd_ort.runtime.stream import Stream


def open_loop(models: Components) -> DeviceLoop:
    """The loop that draws with components on one device, or on two."""
    return DeviceLoop(models) if models.partner is None else SplitGuidanceLoop(models, models.partner)


class SplitGuidanceLoop(DeviceLoop):
    """The loop of `models`' device, with another device for one half of guidance."""

    def __init__(self, models: Components, partner: Components) -> None:
        super().__init__(models)
        self.other = DeviceLoop(partner)
        self.pool = ThreadPoolExecutor(len(GUIDANCE_HALVES), "guidance")
        self.turn = threading.Lock()
        self.events = [Events(loop.models.stream) for loop in (self, self.other)]

    def run(self, drawing: SamplingJob) -> np.ndarray:
        """As `DeviceLoop.run`; without guidance on the first device alone, with a warning."""
        if drawing.guidance is None:
            warn_once("without guidance there is nothing to split: one device draws.")
            return super().run(drawing)
        self.other.wait = self.wait
        with self.turn, self.other.models.lock, self.models.lock:
            first, second = (drawing.half(side) for side in GUIDANCE_HALVES)
            with self.other.models.lock:  # which makes its device the current one
                there = self.other.buffers(second).begin(second)
            with self.models.lock:
                buffers = self.buffers(first)
                here = buffers.begin(first)
                sides = [Side(steps, events) for steps, events in zip((here, there), self.events, strict=True)]
                # A captured graph is its thread's own: in another one ONNX Runtime would capture it again. Replays are
                # queued so quickly that one thread keeps both devices busy.
                pool = None if is_captured(self.models["unet"]) else self.pool
                return buffers.finish(first, [SplitGuidanceStep(sides, pool)])

    def on_weights_updated(self) -> None:
        super().on_weights_updated()
        self.other.on_weights_updated()

    @property
    def held_bytes(self) -> int:
        """As `DeviceLoop.held_bytes`, on both devices."""
        return super().held_bytes + self.other.held_bytes


class Events:
    """What a device tells the other: that its prediction is sent, and that it has taken a step."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream
        if stream is not None:
            self.sent, self.stepped = stream.event(), stream.event()


class Side:
    """One half of guidance on its device."""

    def __init__(self, steps: Steps, events: Events) -> None:
        self.steps, self.events, self.stream = steps, events, events.stream
        shape, dtype = steps.noise.shape(), np.dtype(DTYPES[steps.noise.data_type()])
        self.size = math.prod(shape) * dtype.itemsize  # bytes of a prediction

    def predict(self, other: Side, wait: bool) -> None:
        """Run what predicts, and send the prediction to the other side."""
        if self.stream is None:
            self._run(wait)
            write_value(other.steps.received, read_value(self.steps.noise))
            return
        self.stream.use()
        self._run(wait)
        assert other.stream is not None
        self.stream.follow(other.events.stepped)
        self.stream.send(self.steps.noise.data_ptr(), other.stream, other.steps.received.data_ptr(), self.size)
        self.stream.mark(self.events.sent)

    def _run(self, wait: bool) -> None:
        for part in self.steps.every[:-1]:
            part.run(wait)

    def step(self, other: Side, wait: bool) -> None:
        """Take the step, with both predictions."""
        if self.stream is not None:
            self.stream.use()
            self.stream.follow(other.events.sent)
        self.steps.between.run(wait)
        if self.stream is not None:
            self.stream.mark(self.events.stepped)


class SplitGuidanceStep:
    """One step on two devices. `pool`: where both sides predict at once; None to queue one after the other."""

    def __init__(self, sides: Sequence[Side], pool: ThreadPoolExecutor | None) -> None:
        self.sides, self.pool = sides, pool

    def run(self, wait: bool = True) -> None:
        """Run, or queue without `wait`. Raises SdOrtError when ONNX Runtime fails on either side."""
        turned = self.sides[::-1]
        if self.pool is None:
            for side, other in zip(self.sides, turned, strict=True):
                side.predict(other, wait)
        else:
            pairs = zip(self.sides, turned, strict=True)
            predictions = [self.pool.submit(side.predict, other, wait) for side, other in pairs]
            concurrent.futures.wait(predictions)  # for both, also when one fails
            for prediction in predictions:
                prediction.result()
        for side, other in zip(self.sides, turned, strict=True):
            side.step(other, wait)
        if self.sides[0].stream is not None:
            self.sides[0].stream.use()
