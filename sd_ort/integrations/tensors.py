"""ONNX Runtime sessions on torch tensors: IO binding to torch's memory, and ordering with torch's streams.

A run waits for torch's current stream, and that stream waits for the run; the host does not wait. A GPU graph has fixed
input and output tensors; other inputs are copied to them on the device. The output tensors of one component can be the
input tensors of the next one, without a copy.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sd_ort.core.errors import SdOrtError, first_line
from sd_ort.runtime.bound_run import NO_GRAPH_ID, GpuGraphModel, captures_of, report_failed_capture, run_options
from sd_ort.runtime.capture_lock import CAPTURE_LOCK
from sd_ort.runtime.gpu_graphs import GpuGraph
from sd_ort.runtime.session import DTYPES, Model

if TYPE_CHECKING:
    from sd_ort.runtime.stream import Stream

Tensors = dict[str, torch.Tensor]


def torch_dtype(dtype: Any) -> torch.dtype:
    """Return the torch dtype of a NumPy dtype."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


class TorchBinding:
    """IO binding of a session for torch tensors of one set of shapes.

    `inputs`, `outputs`: contiguous tensors by name, in the graph's dtypes, on one device. `graph_id`: ONNX Runtime's
    annotation for a provider that captures its runs itself, or NO_GRAPH_ID.
    """

    def __init__(self, session: Any, inputs: Tensors, outputs: Tensors, graph_id: int = NO_GRAPH_ID) -> None:
        self.session, self.inputs, self.outputs, self.graph_id = session, inputs, outputs, graph_id
        self.graph: GpuGraph | None = None
        self.io_binding = session.io_binding()
        for name, tensor in inputs.items():
            self.io_binding.bind_input(name, *_memory(tensor))
        for name, tensor in outputs.items():
            self.io_binding.bind_output(name, *_memory(tensor))
        self.options = run_options(graph_id, wait=False)

    def capture(self, stream: Stream) -> None:
        """Capture the run, if that is possible."""
        captures_of(self.session).count += 1
        try:
            self.graph = GpuGraph(stream, self.run)
        except SdOrtError as error:
            report_failed_capture(error)

    def release(self) -> None:
        """Free the GPU graph."""
        if self.graph is not None:
            self.graph.release()
        elif self.graph_id != NO_GRAPH_ID:
            self.session.release_captured_graph(self.graph_id)

    def run(self) -> None:
        """Enqueue the run on the session's stream. Raises SdOrtError if ONNX Runtime fails."""
        if self.graph is not None:
            self.graph.launch()
            return
        try:
            with CAPTURE_LOCK.shared():
                self.session.run_with_iobinding(self.io_binding, self.options)
        except Exception as error:  # pybind's exceptions have no other common base class
            raise _run_error(self.inputs, error) from error


class TorchOrtModel:
    """One session as a function of torch tensors, on a device that torch and ONNX Runtime share.

    `stream`: handle of the session's stream, or None on a CPU, where runs are synchronous. A `GpuGraphModel` is
    captured once per set of shapes; at most `GpuGraphModel.MAX_RUNS` captures are cached.
    """

    def __init__(self, model: Model, device: torch.device, stream: int | None = None) -> None:
        self.model, self.device = model, device
        self.stream = None if stream is None else torch.cuda.ExternalStream(stream, device=device)
        self.dtypes = {name: torch_dtype(model.dtype(name)) for name in model.inputs}
        self.shapes: dict[Any, dict[str, tuple[int, ...]]] = {}
        self.captured_runs: dict[Any, TorchBinding] = {}
        self.reusable_outputs: dict[Any, Tensors] = {}

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
                self.shapes[key] = self._infer_output_shapes(feed)
            if isinstance(self.model, GpuGraphModel):
                outputs = self._replay(self.model, key, feed, zero_copy_inputs)
                return dict(outputs) if reuse_outputs else {name: tensor.clone() for name, tensor in outputs.items()}
            outputs = self._output_buffers(key) if reuse_outputs else self._empty(key)
            self._run_ordered(TorchBinding(self.model.session, feed, outputs))
            return dict(outputs)

    def _replay(self, model: GpuGraphModel, key: Any, feed: Tensors, zero_copy_inputs: Container[str]) -> Tensors:
        """Run the GPU graph of these shapes and return its output tensors; copy all but the zero-copy inputs to it."""
        binding = self.captured_runs.pop(key, None)
        if binding is None:
            if len(self.captured_runs) == model.MAX_RUNS:
                self.captured_runs.pop(next(iter(self.captured_runs))).release()
            with torch.inference_mode(False):  # inference tensors would be read-only outside of inference mode
                inputs = {name: tensor if name in zero_copy_inputs else tensor.clone() for name, tensor in feed.items()}
                graph_id = NO_GRAPH_ID if model.stream is not None else next(model.graph_ids)
                binding = TorchBinding(model.session, inputs, self._empty(key), graph_id)
            self._run_ordered(binding)
            if model.stream is not None:
                binding.capture(model.stream)
        self.captured_runs[key] = binding
        for name, tensor in feed.items():
            if binding.inputs[name] is not tensor:
                binding.inputs[name].copy_(tensor)
        self._run_ordered(binding)
        return binding.outputs

    def _output_buffers(self, key: Any) -> Tensors:
        """Return the reusable output tensors for these shapes; the least recently used shapes are dropped."""
        tensors = self.reusable_outputs.pop(key, None)
        if tensors is None:
            if len(self.reusable_outputs) == GpuGraphModel.MAX_RUNS:
                self.reusable_outputs.pop(next(iter(self.reusable_outputs)))
            with torch.inference_mode(False):
                tensors = self._empty(key)
        self.reusable_outputs[key] = tensors
        return tensors

    def _run_ordered(self, binding: TorchBinding) -> None:
        if self.stream is None:
            binding.run()
            return
        torch_stream = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(torch_stream)
        binding.run()
        torch_stream.wait_stream(self.stream)

    def _empty(self, key: Any) -> Tensors:
        return {
            output.name: torch.empty(self.shapes[key][output.name], dtype=torch_dtype(DTYPES[output.type]),
                                     device=self.device)
            for output in self.model.session.get_outputs()
        }  # fmt: skip

    def _infer_output_shapes(self, feed: Tensors) -> dict[str, tuple[int, ...]]:
        """Return the output shapes for these inputs, from a run whose outputs ONNX Runtime allocates."""
        binding = TorchBinding(self.model.session, feed, {})
        for name in self.model.outputs:
            binding.io_binding.bind_output(name, self.device.type, self.device.index or 0)
        self._run_ordered(binding)
        return {
            name: tuple(value.shape())
            for name, value in zip(self.model.outputs, binding.io_binding.get_outputs(), strict=True)
        }


def _memory(tensor: torch.Tensor) -> tuple[str, int, Any, list[int], int]:
    """Return the arguments of `IOBinding.bind_input` and `bind_output` after the name."""
    dtype = torch.empty(0, dtype=tensor.dtype).numpy().dtype
    return tensor.device.type, tensor.device.index or 0, dtype, list(tensor.shape), tensor.data_ptr()


def _run_error(inputs: Tensors, error: Exception) -> SdOrtError:
    shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in inputs.items())
    return SdOrtError(f"ONNX Runtime failed on {shapes}: {first_line(error)}")
