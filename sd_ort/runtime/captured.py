"""Runs that are captured once as a CUDA or HIP graph and replayed over buffers at fixed addresses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from sd_ort.core.errors import SdOrtError, first_line
from sd_ort.runtime.session import DTYPES, Model
from sd_ort.runtime.wheels import runtime

if TYPE_CHECKING:
    import onnxruntime as ort


class GraphModel(Model):
    """A component whose runs are captured: fixed device buffers and one CUDA or HIP graph for each set of input shapes.

    Made from a session opened with `graph=True`. A call copies its inputs into the buffers, replays the graph and
    copies the outputs out. For more control, `bind` gives the buffers themselves. At most `SHAPES` sets of shapes are
    kept; then the oldest one's buffers are dropped (its graph stays with the session).
    """

    SHAPES = 8

    def __init__(self, session: ort.InferenceSession, device: str = "cuda") -> None:
        super().__init__(session)
        self.device = device
        self.bound: dict[tuple[Any, ...], BoundShapes] = {}
        self.captured = 0

    def __call__(self, **arrays: Any) -> dict[str, np.ndarray]:
        """As `Model.__call__`."""
        if arrays.keys() != self.inputs.keys():
            return super().__call__(**arrays)  # which refuses
        feed = {name: np.ascontiguousarray(array, self.dtype(name)) for name, array in arrays.items()}
        bound = self.bind(feed)
        for name, array in feed.items():
            bound.inputs[name].update_inplace(array)
        try:
            bound.run()
        except Exception as error:  # pybind's exceptions share no base class but Exception
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feed.items())
            raise SdOrtError(f"ONNX Runtime failed on {shapes}: {first_line(error)}") from error
        return {name: value.numpy() for name, value in bound.outputs.items()}

    def bind(self, feed: Mapping[str, np.ndarray]) -> BoundShapes:
        """The buffers and the graph for inputs of the shapes and dtypes of `feed`, whose numbers the inputs get.

        A new set of shapes runs twice: once uncaptured, so that kernels are chosen, memory is reserved and the
        outputs' shapes are known, and then for the capture.
        """
        key = tuple((name, array.shape) for name, array in sorted(feed.items()))
        if key not in self.bound:
            if len(self.bound) == self.SHAPES:
                del self.bound[next(iter(self.bound))]
            self.bound[key] = BoundShapes(self.session, feed, self.device, self.captured)
            self.captured += 1
        return self.bound[key]


def place(device: str) -> dict[str, Any]:
    """A device's name as ONNX Runtime's OrtValue takes it: "cpu" and "cuda", or "gpu:VENDOR" of a plugin provider."""
    kind, _, vendor = device.partition(":")
    return {"device_type": kind, "device_id": 0, **({"vendor_id": int(vendor)} if vendor else {})}


class BoundShapes:
    """Input and output OrtValues at fixed device addresses for one set of shapes, and the graph captured over them."""

    UNCAPTURED = -1  # ONNX Runtime's annotation for a run that neither captures nor replays

    def __init__(self, session: ort.InferenceSession, feed: Mapping[str, np.ndarray], device: str, number: int) -> None:
        self.session = session
        value = runtime().OrtValue
        self.inputs = {name: value.ortvalue_from_numpy(array, **place(device)) for name, array in feed.items()}
        self.binding = session.io_binding()
        for name, bound in self.inputs.items():
            self.binding.bind_ortvalue_input(name, bound)
        names = [output.name for output in session.get_outputs()]
        for name in names:
            # An output of unknown shape cannot be bound to a plugin's memory; the CPU's tells the shape as well.
            self.binding.bind_output(name, "cpu" if ":" in device else device)
        self._run(self.UNCAPTURED)
        sizes = zip(names, session.get_outputs(), self.binding.get_outputs(), strict=True)
        self.outputs = {
            name: value.ortvalue_from_shape_and_type(made.shape(), DTYPES[declared.type], **place(device))
            for name, declared, made in sizes
        }
        self.binding.clear_binding_outputs()
        for name, bound in self.outputs.items():
            self.binding.bind_ortvalue_output(name, bound)
        self.number = number
        self.run()

    def run(self, wait: bool = True) -> None:
        """Run over the buffers, by replay once the graph is captured.

        Returns when the outputs are there or, without `wait`, when the run is queued on the session's own stream: the
        next `run` follows it, and whatever else reads the outputs must come after a `run` that waits.
        """
        self._run(self.number, wait)

    def _run(self, number: int, wait: bool = True) -> None:
        options = runtime().RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(number))
        if not wait:
            options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self.session.run_with_iobinding(self.binding, options)
