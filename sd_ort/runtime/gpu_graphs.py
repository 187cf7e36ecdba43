"""Runs over buffers at fixed addresses, captured once as a CUDA or HIP graph and replayed where that is possible."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import numpy as np

from sd_ort.core.errors import SdOrtError, first_line
from sd_ort.runtime.ort_values import empty_value, place
from sd_ort.runtime.ort_wheel import runtime
from sd_ort.runtime.session import DTYPES, Model

if TYPE_CHECKING:
    import onnxruntime as ort

UNCAPTURED = -1  # ONNX Runtime's annotation for a run that neither captures nor replays

# Held during a capture: meanwhile the driver refuses what other threads ask of any device, memory for one.
CAPTURING = threading.RLock()

# Session of onnxruntime-rocm -> the shapes whose nodes it executed last; see `BoundShapes.is_replayable`.
_STAGED: WeakKeyDictionary[Any, ReferenceType[BoundShapes]] = WeakKeyDictionary()


class GraphModel(Model):
    """A component whose runs are captured: fixed device buffers and one CUDA or HIP graph for each set of input shapes.

    Made from a session opened with `graph=True`. A call copies its inputs into the buffers, replays the graph and
    copies the outputs out. For more control, `bind` gives the buffers themselves. Memory is bounded: at most `SHAPES`
    sets of shapes have buffers and a graph, then the one not used for longest gives way; with an ONNX Runtime that
    cannot release graphs (before 1.27), shapes after the first `SHAPES` run uncaptured. With onnxruntime-rocm only the
    newest shapes are replayed, and earlier ones run uncaptured (`BoundShapes.is_replayable`).
    """

    SHAPES = 8

    def __init__(
        self, session: ort.InferenceSession, device: str = "cuda", lock: AbstractContextManager[Any] | None = None
    ) -> None:
        super().__init__(session, lock)
        self.device = device
        self.bound: dict[tuple[Any, ...], BoundShapes] = {}
        self.captured = 0

    def __call__(self, **arrays: Any) -> dict[str, np.ndarray]:
        """As `Model.__call__`."""
        if arrays.keys() != self.inputs.keys():
            return super().__call__(**arrays)  # which refuses
        feed = {name: np.ascontiguousarray(array, self.dtype(name)) for name, array in arrays.items()}
        with self.lock:
            bound = self.bind(feed)
            for name, array in feed.items():
                bound.inputs[name].update_inplace(array)
            bound.run()
            return {name: value.numpy() for name, value in bound.outputs.items()}

    def bind(self, feed: Mapping[str, np.ndarray]) -> BoundShapes:
        """The buffers and the graph for inputs of the shapes and dtypes of `feed`, whose numbers the inputs get.

        A new set of shapes runs twice: once uncaptured, so that kernels are chosen, memory is reserved and the
        outputs' shapes are known, and then for the capture.
        """
        key = tuple((name, array.shape) for name, array in sorted(feed.items()))
        bound = self.bound.pop(key, None)
        if bound is None:
            if len(self.bound) == self.SHAPES:
                self.bound.pop(next(iter(self.bound))).release()
            bound = BoundShapes(self.session, feed, self.device, self.number())
        self.bound[key] = bound
        return bound

    def number(self) -> int:
        """The annotation of the next graph, or UNCAPTURED when there must be no more of them."""
        if self.captured >= self.SHAPES and not hasattr(self.session, "release_captured_graph"):
            return UNCAPTURED
        self.captured += 1
        return self.captured - 1


class BoundShapes:
    """Input and output OrtValues at fixed device addresses for one set of shapes, and the graph captured over them."""

    def __init__(
        self,
        session: ort.InferenceSession,
        feed: Mapping[str, Any],
        device: str,
        number: int = UNCAPTURED,
        outputs: Mapping[str, Any] | None = None,
    ) -> None:
        """`feed`: for every input an array, which is copied, or an OrtValue on `device`, which is taken as it is and
        may be another run's output. `number`: the graph's annotation, UNCAPTURED for none. `outputs`: OrtValues that
        some outputs are written to; the others get their own. Raises SdOrtError when ONNX Runtime fails.
        """
        self.session = session
        self.number = number
        value = runtime().OrtValue
        self.inputs = {
            name: value.ortvalue_from_numpy(given, **place(device)) if isinstance(given, np.ndarray) else given
            for name, given in feed.items()
        }
        self.outputs = dict(outputs or {})
        self.binding = session.io_binding()
        for name, bound in self.inputs.items():
            self.binding.bind_ortvalue_input(name, bound)
        declared = {output.name: output.type for output in session.get_outputs()}
        missing = [name for name in declared if name not in self.outputs]
        self.waiting, self.queued = (run_options(number, wait) for wait in (True, False))
        self.stages = "ROCMExecutionProvider" in session.get_providers()
        if missing:
            # What has no shape yet cannot be bound to a plugin's memory; on the CPU it gets its shape as well.
            where = place("cpu" if ":" in device else device)
            for name in declared:
                self.binding.bind_output(name, where["device_type"], where["device_id"])
            self._run(run_options(UNCAPTURED, True))
            made = dict(zip(declared, self.binding.get_outputs(), strict=True))
            for name in missing:
                dtype = DTYPES[declared[name]]
                self.outputs[name] = empty_value(made[name].shape(), dtype, device)
            self.binding.clear_binding_outputs()
        for name in declared:
            self.binding.bind_ortvalue_output(name, self.outputs[name])
        if self.stages:
            _STAGED[session] = ref(self)
        with nullcontext() if number == UNCAPTURED else CAPTURING:
            self.run()

    def run(self, wait: bool = True) -> None:
        """Run over the buffers, by replay once the graph is captured.

        Returns when the outputs are there or, without `wait`, when the run is queued on the session's stream: what is
        run next on that stream follows it, and the host may read once something on it was waited for. Raises
        SdOrtError when ONNX Runtime fails.
        """
        if self.number != UNCAPTURED and not self.is_replayable():
            self.number = UNCAPTURED
            self.waiting, self.queued = (run_options(UNCAPTURED, each) for each in (True, False))
        if self.number == UNCAPTURED and self.stages:
            _STAGED[self.session] = ref(self)
        self._run(self.waiting if wait else self.queued)

    def is_replayable(self) -> bool:
        """Whether the captured graph still reads its own addresses.

        onnxruntime-rocm's Concat and Split of unequal parts copy addresses from host memory to the GPU. A graph
        repeats that copy, from memory that the next shapes of the session have written their own addresses to.
        """
        latest = _STAGED.get(self.session) if self.stages else None
        return latest is None or latest() is self

    def release(self) -> None:
        """Give the captured graph back. The buffers go with this object."""
        if self.number != UNCAPTURED and hasattr(self.session, "release_captured_graph"):
            self.session.release_captured_graph(self.number)

    def _run(self, options: Any) -> None:
        try:
            self.session.run_with_iobinding(self.binding, options)
        except Exception as error:  # pybind's exceptions share no base class but Exception
            shapes = ", ".join(f"{name} {list(value.shape())}" for name, value in self.inputs.items())
            raise SdOrtError(f"ONNX Runtime failed on {shapes}: {first_line(error)}") from error


def run_options(number: int, wait: bool) -> Any:
    options = runtime().RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(number))
    if not wait:
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return options
