"""ONNX Runtime sessions on torch tensors: bound runs over torch's memory, and ordering with torch's streams.

A run waits for torch's current stream, and that stream waits for the run; the host does not wait. A GPU graph has fixed
input and output tensors; other inputs are copied to them on the device. The output tensors of one component can be the
input tensors of the next one, without a copy.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sd_ort.runtime.bound_run import BoundRun, GpuGraphModel, ShapeCache
from sd_ort.runtime.ort_values import memory_view
from sd_ort.runtime.session import DTYPES, OrtModel

Tensors = dict[str, torch.Tensor]


def torch_dtype(dtype: Any) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


@dataclass
class CapturedRun:
    """A captured run, and the torch tensors whose memory is bound to it."""

    bound: BoundRun
    inputs: Tensors
    outputs: Tensors


class TorchOrtModel:
    """One session as a function of torch tensors, on a device that torch and ONNX Runtime share.

    `stream`: handle of the session's stream, or None on a CPU, where runs are synchronous. A `GpuGraphModel` is
    captured once per set of shapes.
    """

    def __init__(self, model: OrtModel, device: torch.device, stream: int | None = None) -> None:
        self.model, self.device = model, device
        self.ort_device = f"{device.type}@{device.index}" if device.index else device.type
        self.stream = None if stream is None else torch.cuda.ExternalStream(stream, device=device)
        self.dtypes = {name: torch_dtype(model.dtype(name)) for name in model.inputs}
        self.shapes: dict[Any, dict[str, tuple[int, ...]]] = {}
        self.captured_runs: ShapeCache[CapturedRun] = ShapeCache()
        self.reusable_outputs: ShapeCache[Tensors] = ShapeCache()

    def __call__(
        self, tensors: Mapping[str, torch.Tensor], zero_copy_inputs: Container[str] = (), *, reuse_outputs: bool = False
    ) -> Tensors:
        """Return the outputs by name for the inputs by name. Raises SdOrtError if ONNX Runtime fails.

        Args:
            zero_copy_inputs: names of inputs that are reused outputs of another model; a GPU graph reads them directly.
            reuse_outputs: return the session's own output tensors, which the next such call with equal shapes
                overwrites.
        """
        feed = {
            name: tensor if name in zero_copy_inputs else tensor.to(self.device, self.dtypes[name]).contiguous()
            for name, tensor in tensors.items()
        }
        key = tuple((name, tuple(tensor.shape)) for name, tensor in sorted(feed.items()))
        with self.model.lock:
            if key not in self.shapes:
                with self._ordered():  # ONNX Runtime allocates the outputs of this run
                    bound = BoundRun(self.model.session, self._views(feed), self.ort_device)
                self.shapes[key] = {name: tuple(value.shape()) for name, value in bound.outputs.items()}
            if isinstance(self.model, GpuGraphModel):
                outputs = self._replay(self.model, key, feed, zero_copy_inputs)
                return dict(outputs) if reuse_outputs else {name: tensor.clone() for name, tensor in outputs.items()}
            outputs = self._output_buffers(key) if reuse_outputs else self._empty(key)
            with self._ordered():
                bound = BoundRun(self.model.session, self._views(feed), self.ort_device, outputs=self._views(outputs))
                bound.run(wait=False)
            return dict(outputs)

    def _replay(self, model: GpuGraphModel, key: Any, feed: Tensors, zero_copy_inputs: Container[str]) -> Tensors:
        """Run the GPU graph of these shapes and return its output tensors; copy all but the zero-copy inputs to it."""

        def capture() -> CapturedRun:
            with torch.inference_mode(False):  # inference tensors would be read-only outside of inference mode
                inputs = {name: tensor if name in zero_copy_inputs else tensor.clone() for name, tensor in feed.items()}
                outputs = self._empty(key)
            with self._ordered():
                return CapturedRun(model.capture(self._views(inputs), self._views(outputs)), inputs, outputs)

        run = self.captured_runs.get_or_make(key, capture, lambda run: run.bound.release())
        for name, tensor in feed.items():
            if run.inputs[name] is not tensor:
                run.inputs[name].copy_(tensor)
        with self._ordered():
            run.bound.run(wait=False)
        return run.outputs

    def _output_buffers(self, key: Any) -> Tensors:
        """Return the reusable output tensors for these shapes."""
        with torch.inference_mode(False):
            return self.reusable_outputs.get_or_make(key, lambda: self._empty(key))

    @contextmanager
    def _ordered(self) -> Iterator[None]:
        """Have the session's runs wait for torch's current stream, and that stream for the runs."""
        if self.stream is None:
            yield
            return
        torch_stream = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(torch_stream)
        yield
        torch_stream.wait_stream(self.stream)

    def _empty(self, key: Any) -> Tensors:
        return {
            output.name: torch.empty(self.shapes[key][output.name], dtype=torch_dtype(DTYPES[output.type]),
                                     device=self.device)
            for output in self.model.session.get_outputs()
        }  # fmt: skip

    def _views(self, tensors: Tensors) -> dict[str, Any]:
        """Return OrtValues over the memory of contiguous tensors."""
        return {
            name: memory_view(self.ort_device, tensor.data_ptr(), DTYPE_OF[tensor.dtype], tensor.shape)
            for name, tensor in tensors.items()
        }


DTYPE_OF = {torch_dtype(dtype): dtype for dtype in DTYPES.values()}
