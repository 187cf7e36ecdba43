"""A component whose graph is cut into partitions, one on each device; later ones read the outputs of earlier ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sd_ort.runtime.bound_run import BoundRun, GpuGraphModel, bind
from sd_ort.runtime.ort_values import empty_value, read_value, write_value
from sd_ort.runtime.session import DTYPES, OrtModel

if TYPE_CHECKING:
    from sd_ort.runtime.stream import Stream


class Partition(Protocol):
    """A part of a component's graph: the serialized model over the component's data file, and its initializers."""

    @property
    def graph(self) -> bytes: ...
    @property
    def weights(self) -> frozenset[str]: ...


@dataclass
class PlacedPartition:
    """The session of a partition on its device."""

    model: OrtModel
    device: str
    stream: Stream | None


class PartitionedModel(OrtModel):
    """A partitioned component as one model. Calls on NumPy arrays transfer values through the host.

    `bind` transfers them from device to device.
    """

    def __init__(self, partitions: Sequence[PlacedPartition]) -> None:
        self.partitions = partitions
        self.inputs: dict[str, Any] = {}
        computed: set[str] = set()
        for partition in partitions:
            self.inputs |= {name: value for name, value in partition.model.inputs.items() if name not in computed}
            computed |= set(partition.model.outputs)
        self.outputs = partitions[-1].model.outputs

    def __call__(self, **arrays: Any) -> dict[str, np.ndarray]:
        self.check_names(arrays)
        values = dict(arrays)
        for partition in self.partitions:
            values |= partition.model(**{name: values[name] for name in partition.model.inputs})
        return {name: values[name] for name in self.outputs}

    def bind(self, feed: Mapping[str, Any]) -> BoundPartitions:
        """Return the partitions over buffers; `feed`: OrtValues on the first device."""
        return BoundPartitions(self.partitions, feed)


class BoundPartitions(BoundRun):
    """Partitions over buffers at fixed addresses. Each runs after its inputs were copied to its device.

    `outputs` of the last partition are copied to the first device.
    """

    def __init__(self, partitions: Sequence[PlacedPartition], feed: Mapping[str, Any]) -> None:
        self.partitions = partitions
        values = {name: (value, 0) for name, value in feed.items()}  # with the partition on whose device it is
        self.runs: list[BoundRun] = []
        self.copies: list[list[PeerCopy]] = []
        for index, partition in enumerate(partitions):
            copies: list[PeerCopy] = []
            inputs = {}
            for name in partition.model.inputs:
                value, owner = values[name]
                if owner != index:
                    copies.append(PeerCopy(value, owner, _like(value, partition)))
                    value = copies[-1].target
                inputs[name] = value
            if partition.stream is not None:
                partition.stream.set_device()
            self.runs.append(bind(partition.model, inputs, partition.device))
            values |= {name: (value, index) for name, value in self.runs[-1].outputs.items()}
            self.copies.append(copies)
        self.host_inputs = [name for run in self.runs for name in run.host_inputs]
        last = len(partitions) - 1
        back = [PeerCopy(value, last, _like(value, partitions[0])) for value in self.runs[-1].outputs.values()]
        self.outputs = {name: copy.target for name, copy in zip(self.runs[-1].outputs, back, strict=True)}
        self.copies.append(back)
        self.reserve_events()
        if partitions[0].stream is not None:
            partitions[0].stream.set_device()

    def reserve_events(self) -> None:
        """Create the events of partitions with streams: inputs sent, by sender, and partition run."""
        streams = [partition.stream for partition in self.partitions if partition.stream is not None]
        self.sent = [[stream.event() for stream in streams] for _ in self.copies]
        self.ran = [stream.event() for stream in streams]

    def run(self, wait: bool = True) -> None:
        for index, run in enumerate(self.runs):
            self._transfer(index, index)
            stream = self.partitions[index].stream
            if stream is not None:
                stream.set_device()
            run.run(wait)
            if stream is not None:
                stream.record_event(self.ran[index])
        self._transfer(len(self.runs), 0)

    def _transfer(self, index: int, to: int) -> None:
        """Run the copies before partition `index` to the device of partition `to`, after that device's last reads."""
        receiver = self.partitions[to].stream
        if receiver is None:
            for copy in self.copies[index]:
                write_value(copy.target, read_value(copy.source))
            return
        for sender in dict.fromkeys(copy.sender for copy in self.copies[index]):
            stream, event = self.partitions[sender].stream, self.sent[index][sender]
            assert stream is not None
            stream.set_device()
            stream.wait_event(self.ran[to])
            for copy in self.copies[index]:
                if copy.sender == sender:
                    stream.copy_to_peer(copy.source.data_ptr(), receiver, copy.target.data_ptr(), copy.size)
            stream.record_event(event)
            receiver.wait_event(event)
        receiver.set_device()

    def release(self) -> None:
        """Free the GPU graphs."""
        for run in self.runs:
            run.release()


class PeerCopy:
    """The copy of a value from the device of partition `sender` to another device."""

    def __init__(self, source: Any, sender: int, target: Any) -> None:
        self.source, self.sender, self.target = source, sender, target
        self.size = math.prod(source.shape()) * np.dtype(DTYPES[source.data_type()]).itemsize  # bytes


def _like(value: Any, partition: PlacedPartition) -> Any:
    """Return an OrtValue of the same shape and dtype on a partition's device."""
    return empty_value(value.shape(), DTYPES[value.data_type()], partition.device)


def is_captured(model: OrtModel) -> bool:
    """Return whether runs of a component, or of its first partition, are captured as GPU graphs."""
    return isinstance(model.partitions[0].model if isinstance(model, PartitionedModel) else model, GpuGraphModel)
