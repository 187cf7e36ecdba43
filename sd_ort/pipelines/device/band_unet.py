"""The U-Net of one device of an image in bands of rows: bound graphs, and the memory that devices send and receive.

What goes from a device to another one lies together, in the same order on both, so that it is one copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from sd_ort.graphs import sampling_graphs
from sd_ort.graphs.patches import Band, inputs_from, offered, outputs_for
from sd_ort.runtime.bound_run import BoundRun, GpuGraphModel
from sd_ort.runtime.ort_values import view
from sd_ort.runtime.session import DTYPES

if TYPE_CHECKING:
    from sd_ort.pipelines.device.sessions import DeviceSessions
    from sd_ort.pipelines.partial_steps import BandSteps
    from sd_ort.runtime.session import OrtModel

ALIGNMENT = 256  # bytes, of each value


@dataclass(frozen=True)
class Span:
    """Consecutive memory on a device."""

    address: int
    size: int


class Arena:
    """OrtValues at consecutive offsets of one allocation, each with the shape and dtype of another value."""

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
        self.values = {name: view(self.memory, self.ends[name][0], like, dtype, device) for name, like in likes.items()}

    def span(self, names: Sequence[str]) -> Span:
        """Return the memory of consecutive values."""
        start, end = self.ends[names[0]][0], self.ends[names[-1]][1]
        return Span(self.memory.data_ptr() + start, end - start)


class BandUnet:
    """The two U-Net graphs of one device: the complete image's and its band's.

    `received`: what the other bands offered in the last two steps, by the parity of the step. The band's graph reads
    these extrapolated to its own step.
    """

    def __init__(self, sessions: DeviceSessions, steps: BandSteps, unet: OrtModel, values: Mapping[str, Any]) -> None:
        """Bind both graphs. The complete graph's outputs include the values that other devices send in later steps."""
        self.band = band = Band(steps.index, steps.count)
        device, graph = sessions.models.device, partial(sessions.graph, capture=isinstance(unet, GpuGraphModel))
        likes = BoundRun(unet.session, {name: values[name] for name in unet.inputs}, device).outputs
        likes = {name: likes[name] for other in band.others for name in inputs_from(likes, band, other)}
        self.received = [Arena(sessions, likes) for _ in range(2)]
        read = Arena(sessions, likes)
        self.full = [sessions.bind(unet, values, self.received[0].values)]
        shared = {name: value for name, value in self.full[0].outputs.items() if name not in likes}
        self.full.append(sessions.bind(unet, values, shared | self.received[1].values))
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
        """Outputs of the complete graph."""
        return self.full[0].outputs

    def begin(self, steps: BandSteps) -> None:
        """Begin an image: its first steps compute all rows."""
        self.steps, self.index, self.is_full = steps, 0, True

    def run(self, wait: bool = True) -> None:
        """Compute the next step's rows, all of them or the band's; without `wait`, only enqueue it."""
        self.is_full, self.parity, self.index = self.steps.is_full(self.index), self.index % 2, self.index + 1
        if self.is_full:
            self.full[self.parity].run(wait)
            return
        for run in (self.extrapolate[1 - self.parity], self.cut, self.rows):
            run.run(wait)

    def copies_to(self, other: BandUnet) -> list[tuple[Span, Span]]:
        """Return the memory that another band reads after this step: spans of this device and of the other's."""
        names, read = self.offered.values, other.received[self.parity]
        source = self.offered.span(outputs_for(names, self.band, other.band.index))
        target = read.span(inputs_from(read.values, other.band, self.band.index))
        rows = (each.bands[self.band.index].data_ptr() for each in (self, other))
        local, remote = (Span(address, self.rows_size) for address in rows)
        return [(source, target), (local, remote)]

    def release(self) -> None:
        """Free the GPU graphs."""
        for run in (*self.full, *self.extrapolate, self.cut, self.rows, self.join):
            run.release()
