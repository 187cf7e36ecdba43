"""Components with weights in pinned host memory, which a stream copies to the device part by part during the runs.

Its graph is cut into partitions. As many as fit stay on the device. Each other one reads its weights from one of two
buffers there. While a partition runs, the weights of the next streamed one are copied to the other buffer.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sd_ort.core.pipeline_folder import DATA
from sd_ort.runtime.bound_run import BoundRun, ShapeCache
from sd_ort.runtime.capture_lock import device_calls
from sd_ort.runtime.ort_values import device_arguments, device_value, read_value, value_at, write_value
from sd_ort.runtime.partitioned import Partition
from sd_ort.runtime.session import OrtModel
from sd_ort.runtime.stream import Stream
from sd_ort.runtime.weight_prefetch import ALIGNMENT, ELEMENTS, MIN_TENSOR, data_weights

MIN_COUNT = 4  # partitions: with two, both buffers together would hold all weights
RESIDENT_SHARE = 0.75  # of the device's memory that a component's weights may take; a step computes in the rest
PCIE_BYTES = 25e9  # a second, of pinned memory over 16 lanes of PCIe 4.0


@dataclass(frozen=True)
class StreamPlan:
    """Partitions of a component whose weights are streamed to the device.

    count: number of all. resident: number of those that stay on the device. The number of the others is even, so that
    the last one of a step and the first one of the next have different buffers.
    """

    count: int
    resident: int

    @classmethod
    def of(cls, weights: int, budget: float) -> StreamPlan | None:
        """Return the plan for bytes of weights and `budget` bytes of device memory; None if the weights fit.

        Two partitions take at most a quarter of the budget. What they leave of `RESIDENT_SHARE` is for resident ones.
        """
        if weights <= RESIDENT_SHARE * budget:
            return None
        count = max(MIN_COUNT, 2 * math.ceil(4 * weights / max(budget, 1)))
        resident = max(0, math.floor(RESIDENT_SHARE * budget * count / weights) - 2)
        return cls(count, resident - (count - resident) % 2 if resident else 0)

    @property
    def streamed(self) -> list[int]:
        """Indices of the streamed partitions. Resident partitions are evenly spaced: they run during copies."""
        number = self.count - self.resident
        return [index * self.count // number for index in range(number)]

    def describe(self, weights: int) -> str:
        """Return a sentence on the bytes that are copied in a step and the least time that this takes."""
        streamed = weights * len(self.streamed) / self.count
        return (
            f"{streamed / 1e9:.2f} GB of its {weights / 1e9:.2f} GB of weights are streamed from host memory in each "
            f"step, in {len(self.streamed)} parts: at least {1e3 * streamed / PCIE_BYTES:.0f} ms a step over PCIe 4.0 "
            f"x16 ({PCIE_BYTES / 1e9:.0f} GB/s)"
        )


class StreamMemory:
    """Memory of a stream's device, or pinned memory of the host that the device copies from."""

    def __init__(self, stream: Stream, size: int, *, pinned: bool = False) -> None:
        """Raises MemoryError if there is too little."""
        self.stream, self.size, self.kind = stream, size, "Host" if pinned else ""
        data = ctypes.c_void_p()
        stream.set_device()
        if stream.c_function(f"Malloc{self.kind}")(ctypes.byref(data), ctypes.c_size_t(max(size, 1))):
            where = "pinned host memory" if pinned else "device memory"
            raise MemoryError(f"{size / 1e6:.0f} MB of {where} for streamed weights are not free")
        self.address = int(data.value or 0)

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            self.stream.c_function(f"Free{self.kind}")(ctypes.c_void_p(self.address))


@dataclass
class PartitionWeights:
    """Streamed weights of a partition: dtype, shape, offset in the buffer and offset in the file by name."""

    entries: dict[str, tuple[int, list[int], int, int]]
    size: int

    @classmethod
    def of(cls, graph: bytes) -> PartitionWeights:
        """Return the floating-point weights of a graph that are in the data file."""
        entries, size = {}, 0
        for name, dtype, shape, offset, length in data_weights(graph):
            if length >= MIN_TENSOR and dtype in ELEMENTS and length == math.prod(shape) * ELEMENTS[dtype]:
                entries[name] = dtype, shape, size, offset
                size += length + -length % ALIGNMENT
        return cls(entries, size)

    def fill(self, target: np.ndarray, file: np.ndarray, replaced: Mapping[str, np.ndarray]) -> None:
        """Write the weights to bytes of a buffer: those of the file, or the `replaced` ones."""
        for name, (dtype, shape, begin, offset) in self.entries.items():
            length = math.prod(shape) * ELEMENTS[dtype]
            if name in replaced:
                source = np.ascontiguousarray(replaced[name]).reshape(-1).view(np.uint8)
            else:
                source = file[offset : offset + length]
            target[begin : begin + length] = source


class PinnedWeights:
    """Weights of the streamed partitions in pinned host memory, with the stream that copies them. Outlives sessions."""

    def __init__(
        self, partitions: Sequence[Partition], plan: StreamPlan, model: Path, replaced: Mapping[str, np.ndarray],
        compute: Stream,
    ) -> None:  # fmt: skip
        """`replaced`: weights instead of the file's. Raises MemoryError if there is too little memory."""
        self.partitions, self.plan, self.compute = partitions, plan, compute
        self.weights = [PartitionWeights.of(partition.graph) for partition in partitions]
        self.file, self.replaced = model.parent / DATA, replaced
        self.memory: dict[int, StreamMemory] = {}
        for index in plan.streamed:
            memory = StreamMemory(compute, self.weights[index].size, pinned=True)
            target = np.ctypeslib.as_array((ctypes.c_uint8 * max(memory.size, 1)).from_address(memory.address))
            self.read(index, target)
            self.memory[index] = memory
        self.copies = Stream(compute.c._name, compute.prefix, compute.device)
        self.copied = {index: compute.event() for index in plan.streamed}
        self.ran = {index: compute.event() for index in plan.streamed}

    def read(self, index: int, target: np.ndarray) -> None:
        """Write the weights of a partition to bytes of memory."""
        self.weights[index].fill(target, np.memmap(self.file, np.uint8, "r"), self.replaced)


class WeightStream:
    """The weights of all partitions on the device: resident ones, and two buffers in which streamed ones take turns."""

    def __init__(self, pinned: PinnedWeights) -> None:
        """Raises MemoryError if there is too little memory."""
        self.pinned, self.compute, self.order = pinned, pinned.compute, pinned.plan.streamed
        largest = max(pinned.weights[index].size for index in self.order)
        buffers = [StreamMemory(self.compute, largest) for _ in range(2)]
        self.memory = {index: buffers[position % 2] for position, index in enumerate(self.order)}
        for index, weights in enumerate(pinned.weights):
            if index not in self.memory:
                self.memory[index] = memory = StreamMemory(self.compute, weights.size)
                source = np.empty(max(weights.size, 1), np.uint8)
                pinned.read(index, source)
                self._queue(self.compute, memory, source.ctypes.data, weights.size)
                self.compute.synchronize()
        for index in self.order[:2]:
            self.copy(index)

    @property
    def device_bytes(self) -> int:
        """The size of all memory on the device."""
        return sum(memory.size for memory in set(self.memory.values()))

    def views(self, index: int, device: str) -> dict[str, Any]:
        """Return an OrtValue of each weight of a partition on the device."""
        memory = self.memory[index]
        return {
            name: value_at(device, memory.address + begin, dtype, shape, owner=memory)
            for name, (dtype, shape, begin, _) in self.pinned.weights[index].entries.items()
        }

    def _queue(self, stream: Stream, to: StreamMemory, source: int, size: int) -> None:
        addresses, handle = (ctypes.c_void_p(to.address), ctypes.c_void_p(source)), ctypes.c_void_p(stream.handle)
        stream.call("MemcpyToDeviceAsync", *addresses, ctypes.c_size_t(size), handle)

    def copy(self, index: int) -> None:
        """Queue the copy of a streamed partition's weights, after the run of the partition that had its buffer."""
        pinned = self.pinned
        pinned.copies.wait_event(pinned.ran[self.order[self.order.index(index) - 2]])
        source = pinned.memory[index]
        self._queue(pinned.copies, self.memory[index], source.address, source.size)
        pinned.copies.record_event(pinned.copied[index])

    def before(self, index: int) -> None:
        """Let the run of a partition wait for its weights."""
        if index in self.pinned.copied:
            self.compute.wait_event(self.pinned.copied[index])

    def after(self, index: int) -> None:
        """Have the buffer of a streamed partition that is queued filled for the next one that reads it."""
        if index in self.pinned.ran:
            self.compute.record_event(self.pinned.ran[index])
            self.copy(self.order[(self.order.index(index) + 2) % len(self.order)])

    def __del__(self) -> None:
        self.pinned.copies.synchronize()
        self.compute.synchronize()


class StreamedModel(OrtModel):
    """Function of NumPy arrays that runs the partitions of a component over streamed weights."""

    def __init__(
        self,
        weights: WeightStream,
        open_session: Callable[[Partition, Mapping[str, Any], Mapping[str, str]], Any],
        device: str,
        lock: AbstractContextManager[Any],
        memory_limit: int | None = None,
    ) -> None:
        """Open a session for each partition.

        `open_session`: returns the session of a partition with these updatable weights and further provider options.
        `memory_limit`: bytes of device memory for the buffers and for what all sessions allocate together.
        """
        settings = {"shared_pool": "1"}
        if memory_limit is not None:
            settings["memory_limit"] = str(max(0, memory_limit - weights.device_bytes))
        self.partitions = [
            OrtModel(open_session(part, weights.views(index, device), settings), lock)
            for index, part in enumerate(weights.pinned.partitions)
        ]
        self.weights, self.device, self.lock = weights, device, lock
        computed: set[str] = set()
        self.inputs: dict[str, Any] = {}
        for partition in self.partitions:
            self.inputs |= {name: value for name, value in partition.inputs.items() if name not in computed}
            computed |= set(partition.outputs)
        self.outputs = self.partitions[-1].outputs
        self.runs: ShapeCache[list[BoundRun]] = ShapeCache()

    def __call__(self, **arrays: Any) -> dict[str, np.ndarray]:
        """Run all partitions; arguments and result are those of `Model.__call__`."""
        self.check_names(arrays)
        feed = {name: np.ascontiguousarray(array, self.dtype(name)) for name, array in arrays.items()}
        with self.lock:
            key = tuple((name, array.shape) for name, array in sorted(feed.items()))
            if key not in self.runs:
                self.runs.clear()  # buffers of one size at a time
            runs = self.runs.get_or_make(key, lambda: self._bind(feed))
            for name, array in feed.items():
                write_value(next(run.inputs[name] for run in runs if name in run.inputs), array)
            for index, run in enumerate(runs):
                self.weights.before(index)
                run.run(wait=index == len(runs) - 1)
                self.weights.after(index)
            return {name: read_value(runs[-1].outputs[name]) for name in self.outputs}

    def _bind(self, feed: Mapping[str, np.ndarray]) -> list[BoundRun]:
        """Bind each partition to buffers and return the runs. A first run infers shapes between partitions."""
        values: dict[str, Any] = {name: device_value(array, self.device) for name, array in feed.items()}
        runs: list[BoundRun] = []
        for partition in self.partitions:
            inputs = {name: values[name] for name in partition.inputs}
            outputs = self._outputs(partition, inputs)
            runs.append(BoundRun(partition.session, inputs, self.device, outputs=outputs))
            values |= runs[-1].outputs
        return runs

    def _outputs(self, partition: OrtModel, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return device memory for the outputs of a partition, of any type that weights have."""
        binding, host = partition.session.io_binding(), device_arguments("cpu")
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        for name in partition.outputs:
            binding.bind_output(name, host["device_type"], host["device_id"])
        with device_calls(self.device):
            partition.session.run_with_iobinding(binding)
        outputs = {}
        for name, output in zip(partition.outputs, binding.get_outputs(), strict=True):
            element, shape = output.element_type(), output.shape()
            memory = StreamMemory(self.weights.compute, math.prod(shape) * ELEMENTS[element])
            outputs[name] = value_at(self.device, memory.address, element, shape, owner=memory)
        return outputs
