"""ONNX Runtime on torch's memory: inputs and outputs are bound where they lie, and streams wait for each other.

A run reads what torch's current stream has written by then, and what torch does next follows the run; nobody waits on
the host. A captured graph reads and writes fixed tensors: what lies elsewhere is copied into them, on the device. One
graph may lend its outputs to the next, which then reads them where they lie.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch

from sd_ort.core.errors import SdOrtError, first_line
from sd_ort.runtime.captured import UNCAPTURED, GraphModel, run_options
from sd_ort.runtime.session import DTYPES, Model

Tensors = dict[str, torch.Tensor]


def torch_dtype(dtype: Any) -> torch.dtype:
    """NumPy's dtype as torch's."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


class Bound:
    """A session's run over torch tensors of one set of shapes, captured as graph `number` or not.

    `inputs`, `outputs`: contiguous tensors by name, of the graph's dtypes, on one device.
    """

    def __init__(self, session: Any, inputs: Tensors, outputs: Tensors, number: int = UNCAPTURED) -> None:
        self.session, self.inputs, self.outputs, self.number = session, inputs, outputs, number
        self.binding = session.io_binding()
        for name, tensor in inputs.items():
            self.binding.bind_input(name, *_memory(tensor))
        for name, tensor in outputs.items():
            self.binding.bind_output(name, *_memory(tensor))
        self.options = _queued(number)

    def run(self) -> None:
        """Queue the run on the session's stream. Raises SdOrtError when ONNX Runtime fails."""
        try:
            self.session.run_with_iobinding(self.binding, self.options)
        except Exception as error:  # pybind's exceptions share no base class but Exception
            raise _failed(self.inputs, error) from error


class TensorModel:
    """One component as a function of torch tensors on a device that torch and ONNX Runtime share.

    Made from a session on the stream `stream` (its handle; None on a CPU, whose runs are waited for). A `GraphModel`
    is captured once for a set of shapes, of which at most `GraphModel.SHAPES` are kept.
    """

    def __init__(self, model: Model, device: torch.device, stream: int | None = None) -> None:
        self.model, self.device = model, device
        self.stream = None if stream is None else torch.cuda.ExternalStream(stream, device=device)
        self.dtypes = {name: torch_dtype(model.dtype(name)) for name in model.inputs}
        self.shapes: dict[Any, dict[str, tuple[int, ...]]] = {}
        self.captured: dict[Any, Bound] = {}
        self.lends: dict[Any, Tensors] = {}

    def __call__(
        self, tensors: Mapping[str, torch.Tensor], lent: Container[str] = (), *, lend: bool = False
    ) -> Tensors:
        """Outputs by name for one tensor an input. Raises SdOrtError when ONNX Runtime fails.

        They are the caller's own, or with `lend` good until the next such call of these shapes, which refills them.
        `lent`: names of inputs that another model lent, which a graph captured now reads where they lie.
        """
        given = {
            name: tensor if name in lent else tensor.to(self.device, self.dtypes[name]).contiguous()
            for name, tensor in tensors.items()
        }
        key = tuple((name, tuple(tensor.shape)) for name, tensor in sorted(given.items()))
        with self.model.lock:
            if key not in self.shapes:
                self.shapes[key] = self._learn(given)
            if isinstance(self.model, GraphModel):
                outputs = self._replay(self.model, key, given, lent)
                return dict(outputs) if lend else {name: tensor.clone() for name, tensor in outputs.items()}
            outputs = self._lending(key) if lend else self._empty(key)
            self._queued(Bound(self.model.session, given, outputs))
            return dict(outputs)

    def _replay(self, model: GraphModel, key: Any, given: Tensors, lent: Container[str]) -> Tensors:
        """The outputs of the graph of these shapes, whose tensors are fixed: inputs are copied in, but those lent."""
        bound = self.captured.pop(key, None)
        if bound is None:
            if len(self.captured) == model.SHAPES:
                oldest = self.captured.pop(next(iter(self.captured)))
                if oldest.number != UNCAPTURED and hasattr(model.session, "release_captured_graph"):
                    model.session.release_captured_graph(oldest.number)
            with torch.inference_mode(False):  # outside of it, where a host may come back, its tensors are read-only
                inputs = {name: tensor if name in lent else tensor.clone() for name, tensor in given.items()}
                bound = Bound(model.session, inputs, self._empty(key), model.number())
            self._queued(bound)  # captures
        self.captured[key] = bound
        for name, tensor in given.items():
            if bound.inputs[name] is not tensor:
                bound.inputs[name].copy_(tensor)
        self._queued(bound)
        return bound.outputs

    def _lending(self, key: Any) -> Tensors:
        """The tensors that outputs for these shapes are lent in: always the same, but for the longest unused shapes."""
        tensors = self.lends.pop(key, None)
        if tensors is None:
            if len(self.lends) == GraphModel.SHAPES:
                self.lends.pop(next(iter(self.lends)))
            with torch.inference_mode(False):
                tensors = self._empty(key)
        self.lends[key] = tensors
        return tensors

    def _queued(self, bound: Bound) -> None:
        if self.stream is None:
            bound.run()
            return
        torchs = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(torchs)
        bound.run()
        torchs.wait_stream(self.stream)

    def _empty(self, key: Any) -> Tensors:
        return {
            output.name: torch.empty(self.shapes[key][output.name], dtype=torch_dtype(DTYPES[output.type]),
                                     device=self.device)
            for output in self.model.session.get_outputs()
        }  # fmt: skip

    def _learn(self, given: Tensors) -> dict[str, tuple[int, ...]]:
        """Shapes of the outputs for these inputs, by a run whose outputs ONNX Runtime allocates."""
        bound = Bound(self.model.session, given, {})
        for name in self.model.outputs:
            bound.binding.bind_output(name, self.device.type, self.device.index or 0)
        self._queued(bound)
        return {
            name: tuple(value.shape())
            for name, value in zip(self.model.outputs, bound.binding.get_outputs(), strict=True)
        }


@cache
def _queued(number: int) -> Any:
    """Options of runs that are not waited for: a run that is not captured would make them anew at every step."""
    return run_options(number, wait=False)


def _memory(tensor: torch.Tensor) -> tuple[str, int, Any, list[int], int]:
    """What `IOBinding.bind_input` and `bind_output` take behind the name."""
    dtype = torch.empty(0, dtype=tensor.dtype).numpy().dtype
    return tensor.device.type, tensor.device.index or 0, dtype, list(tensor.shape), tensor.data_ptr()


def _failed(inputs: Tensors, error: Exception) -> SdOrtError:
    shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in inputs.items())
    return SdOrtError(f"ONNX Runtime failed on {shapes}: {first_line(error)}")
