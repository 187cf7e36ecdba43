"""A component whose graph is cut into ranges, each on a device of its own: what one gives, the next ones read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sd_ort.runtime.bound_run import BoundRun, GpuGraphModel, bind
from sd_ort.runtime.ort_values import empty_value, read_value, write_value
from sd_ort.runtime.session import DTYPES, Model

if TYPE_CHECKING:
    from sd_ort.runtime.stream import Stream


class Range(Protocol):
    """A part of a component's graph, as bytes over the whole one's data file, and the names of its initializers."""

    @property
    def graph(self) -> bytes: ...
    @property
    def weights(self) -> frozenset[str]: ...


@dataclass
class Link:
    """A range of a component on its device."""

    model: Model
    device: str
    stream: Stream | None


class PartitionedModel(Model):
    """The ranges as one function of NumPy arrays; what is handed on goes through the host. `bind` hands it on from
    device to device."""

    def __init__(self, links: Sequence[Link]) -> None:
        self.links = links
        self.inputs: dict[str, Any] = {}
        made: set[str] = set()
        for link in links:
            self.inputs |= {name: value for name, value in link.model.inputs.items() if name not in made}
            made |= set(link.model.outputs)
        self.outputs = links[-1].model.outputs

    def __call__(self, **arrays: Any) -> dict[str, np.ndarray]:
        """As `Model.__call__`."""
        self.check_names(arrays)
        values = dict(arrays)
        for link in self.links:
            values |= link.model(**{name: values[name] for name in link.model.inputs})
        return {name: values[name] for name in self.outputs}

    def bind(self, feed: Mapping[str, Any]) -> BoundPartitions:
        """The ranges over buffers; `feed`: OrtValues on the first device."""
        return BoundPartitions(self.links, feed)


class BoundPartitions(BoundRun):
    """Ranges over buffers at fixed addresses, each run after what it reads was copied to its device.

    `outputs` of the last range lie on the first device again.
    """

    def __init__(self, links: Sequence[Link], feed: Mapping[str, Any]) -> None:
        self.links = links
        self.places = {name: (value, 0) for name, value in feed.items()}
        self.parts: list[BoundRun] = []
        self.copies: list[list[Copy]] = []
        for number, link in enumerate(links):
            copies: list[Copy] = []
            inputs = {}
            for name in link.model.inputs:
                value, owner = self.places[name]
                if owner != number:
                    copies.append(Copy(value, owner, _like(value, link)))
                    value = copies[-1].target
                inputs[name] = value
            if link.stream is not None:
                link.stream.use()
            self.parts.append(bind(link.model, inputs, link.device))
            self.places |= {name: (value, number) for name, value in self.parts[-1].outputs.items()}
            self.copies.append(copies)
        self.host_inputs = [name for part in self.parts for name in part.host_inputs]
        last = len(links) - 1
        back = [Copy(value, last, _like(value, links[0])) for value in self.parts[-1].outputs.values()]
        self.outputs = {name: copy.target for name, copy in zip(self.parts[-1].outputs, back, strict=True)}
        self.copies.append(back)
        self.reserve_events()
        if links[0].stream is not None:
            links[0].stream.use()

    def reserve_events(self) -> None:
        """Events of each range, if it has a stream: that what it reads is sent, by each other one, and that it ran."""
        streams = [link.stream for link in self.links if link.stream is not None]
        self.sent = [[stream.event() for stream in streams] for _ in self.copies]
        self.ran = [stream.event() for stream in streams]

    def run(self, wait: bool = True) -> None:
        """As `BoundRun.run`."""
        for number, part in enumerate(self.parts):
            self._hand_over(number, number)
            stream = self.links[number].stream
            if stream is not None:
                stream.use()
            part.run(wait)
            if stream is not None:
                stream.mark(self.ran[number])
        self._hand_over(len(self.parts), 0)

    def _hand_over(self, number: int, to: int) -> None:
        """Copy what comes before range `number` to the device of range `to`, once that device has read the last one."""
        receiver = self.links[to].stream
        if receiver is None:
            for copy in self.copies[number]:
                write_value(copy.target, read_value(copy.source))
            return
        for sender in dict.fromkeys(copy.source_link for copy in self.copies[number]):
            stream, event = self.links[sender].stream, self.sent[number][sender]
            assert stream is not None
            stream.use()
            stream.follow(self.ran[to])
            for copy in self.copies[number]:
                if copy.source_link == sender:
                    stream.send(copy.source.data_ptr(), receiver, copy.target.data_ptr(), copy.size)
            stream.mark(event)
            receiver.follow(event)
        receiver.use()

    def release(self) -> None:
        """Give the captured graphs back."""
        for part in self.parts:
            part.release()


class Copy:
    """A value of one range, and where another has it."""

    def __init__(self, source: Any, source_link: int, target: Any) -> None:
        self.source, self.source_link, self.target = source, source_link, target
        self.size = math.prod(source.shape()) * np.dtype(DTYPES[source.data_type()]).itemsize  # bytes


def _like(value: Any, link: Link) -> Any:
    """Memory for the same on a range's device."""
    return empty_value(value.shape(), DTYPES[value.data_type()], link.device)


def is_captured(model: Model) -> bool:
    """Whether runs of a component, or of its first range, are captured as graphs."""
    return isinstance(model.links[0].model if isinstance(model, PartitionedModel) else model, GpuGraphModel)
