"""Runs over OrtValues at fixed device addresses, captured as GPU graphs if the provider and the session can."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from sd_ort.core.cache import cache_folder
from sd_ort.core.errors import InputError, SdOrtError, first_line
from sd_ort.runtime.capture_lock import device_calls
from sd_ort.runtime.gpu_graphs import CAPTURE_ATTEMPTS, GpuGraph
from sd_ort.runtime.ort_values import device_arguments, device_value, empty_value, read_value, write_value
from sd_ort.runtime.ort_wheel import FATAL_ONLY, import_onnxruntime
from sd_ort.runtime.providers import provider_named, warn_once
from sd_ort.runtime.session import DEFAULT_OPTIONS, DTYPES, OrtModel, SessionOptions, create_session, run_error
from sd_ort.runtime.stream import Stream, open_stream

if TYPE_CHECKING:
    import onnxruntime as ort

NO_GRAPH_ID = -1  # ONNX Runtime's annotation of a run that the provider neither captures nor replays
MAX_CAPTURES = 64  # of a session until its staging memory is freed: about 50 kB each for the U-Net of SD 1.5

FAILED_CAPTURES = "failed_captures.log"  # in the cache folder: a line for each capture that failed, for `sd-ort doctor`


@dataclass
class SessionCaptures:
    """The GPU graphs that were captured of one session, since `generation` of its staging memory began.

    A synchronous run of ONNX Runtime frees the staging memory that these graphs read. So there is none while `count` is
    not 0; then this memory grows with every run that is no launch. After `MAX_CAPTURES` the next generation begins with
    a synchronous run, and graphs of earlier ones are captured again.
    """

    count: int = 0
    generation: int = 0

    def begin(self) -> None:
        """Begin the next generation if this one is full."""
        if self.count >= MAX_CAPTURES:
            self.count, self.generation = 0, self.generation + 1


_captures: WeakKeyDictionary[Any, SessionCaptures] = WeakKeyDictionary()


def captures_of(session: ort.InferenceSession) -> SessionCaptures:
    """Return the record of a session."""
    return _captures.setdefault(session, SessionCaptures())


class BoundRun:
    """One session over input and output OrtValues at fixed addresses, with the GPU graph that was captured over them.

    A run that cannot be captured runs uncaptured, and is reported (`report_failed_capture`). ONNX Runtime copies
    `host_inputs` to the host when they are bound. They are bound again before each run, and must have been computed.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        feed: Mapping[str, Any],
        device: str,
        *,
        stream: Stream | None = None,
        graph_id: int = NO_GRAPH_ID,
        outputs: Mapping[str, Any] | None = None,
    ) -> None:
        """Bind the buffers. If an output is missing in `outputs`, or if the run is captured, it runs twice before.

        Args:
            feed: for each input an array, which is copied, or an OrtValue on `device`, which may be another run's
                output.
            stream: the session's stream, on which the run is captured; None to capture nothing here.
            graph_id: ONNX Runtime's annotation of the run for a provider that captures its runs itself.
            outputs: OrtValues for some of the outputs; the others are allocated.

        Raises:
            SdOrtError: if ONNX Runtime fails.
        """
        self.session, self.stream, self.graph_id = session, stream, graph_id
        self.graph: GpuGraph | None = None
        self.shared: Mapping[str, Any] | None = None  # whose arrays the inputs have, of `GpuGraphModel`
        self.captures = captures_of(session)
        self.generation = 0  # of the graph
        if stream is not None:
            self.captures.begin()
        self.device = device
        self.inputs = {
            name: device_value(value, device) if isinstance(value, np.ndarray) else value
            for name, value in feed.items()
        }
        self.host_inputs = [name for name in host_inputs(session) if self.inputs[name].device_name() != "cpu"]
        self.binding = session.io_binding()
        for name, bound in self.inputs.items():
            self.binding.bind_ortvalue_input(name, bound)
        self.outputs = self._bind_outputs(device, dict(outputs or {}))
        if stream is not None:
            self._capture(stream)
        elif graph_id != NO_GRAPH_ID:
            self.run()

    def _bind_outputs(self, device: str, outputs: dict[str, Any]) -> dict[str, Any]:
        """Bind all outputs. A run by ONNX Runtime's own buffers tells the shapes of those to allocate."""
        declared = {output.name: output.type for output in self.session.get_outputs()}
        missing = [name for name in declared if name not in outputs]
        if missing:
            # What has no shape yet cannot be bound to a plugin's memory; on the CPU it gets its shape as well.
            where = device_arguments("cpu" if ":" in device else device)
            for name in declared:
                self.binding.bind_output(name, where["device_type"], where["device_id"])
            self._run(NO_GRAPH_ID, wait=True)
            allocated = dict(zip(declared, self.binding.get_outputs(), strict=True))
            outputs |= {name: empty_value(allocated[name].shape(), DTYPES[declared[name]], device) for name in missing}
            self.binding.clear_binding_outputs()
        for name in declared:
            self.binding.bind_ortvalue_output(name, outputs[name])
        # ONNX Runtime allocates by the memory pattern of the first run from the second one on. Kernels are chosen, and
        # workspaces are in the arena, before anything is captured.
        for _ in range(0 if self.graph_id != NO_GRAPH_ID else 1 if missing else 2 if self.stream is not None else 0):
            self._run(NO_GRAPH_ID, wait=True)
        return outputs

    def _capture(self, stream: Stream) -> None:
        self.captures.count += 1
        self.generation = self.captures.generation
        try:
            self.graph = GpuGraph(stream, lambda: self._run(NO_GRAPH_ID, wait=False))
        except SdOrtError as error:
            report_failed_capture(error)

    def run(self, wait: bool = True) -> None:
        """Run over the buffers, by the GPU graph if there is one.

        Returns when the outputs are there or, without `wait`, when the run is enqueued on the session's stream. Raises
        SdOrtError if ONNX Runtime fails.
        """
        if self.graph is not None and self.generation != self.captures.generation:
            stream = self.graph.stream
            self.graph.release()
            self.graph = None
            self._capture(stream)
        if self.graph is not None:
            self.graph.launch()
            if wait:
                self.graph.stream.synchronize()
            return
        if self.graph_id == NO_GRAPH_ID:
            self._run(self.graph_id, wait)
            return
        for _ in range(CAPTURE_ATTEMPTS):
            try:
                self._run(self.graph_id, wait)
            except SdOrtError as error:
                failure = error
            else:
                return
        self.graph_id = NO_GRAPH_ID
        self._run(self.graph_id, wait)
        report_failed_capture(failure)

    def release(self) -> None:
        """Free the GPU graph. The buffers go with this object."""
        if self.graph is not None:
            self.graph.release()
        elif self.graph_id != NO_GRAPH_ID:
            self.session.release_captured_graph(self.graph_id)

    def _run(self, graph_id: int, wait: bool) -> None:
        try:
            with device_calls(self.device):
                for name in self.host_inputs:
                    self.binding.bind_ortvalue_input(name, self.inputs[name])
                options = run_options(graph_id, wait and not self.captures.count)
                self.session.run_with_iobinding(self.binding, options)
            if wait and self.captures.count and self.stream is not None:
                self.stream.synchronize()
        except Exception as error:  # pybind's exceptions share no base class but Exception
            raise run_error(error, {name: value.shape() for name, value in self.inputs.items()}) from error


def host_inputs(session: ort.InferenceSession) -> list[str]:
    """Return the inputs that nodes on the CPU read; none for ONNX Runtime before 1.23, which does not tell."""
    if not hasattr(session, "get_input_memory_infos"):
        return []
    pairs = zip(session.get_inputs(), session.get_input_memory_infos(), strict=True)
    return [value.name for value, memory in pairs if memory.name == "Cpu"]


@cache
def run_options(graph_id: int, wait: bool) -> Any:
    """Return the options of a run; all runs share them."""
    options = import_onnxruntime().RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph_id))
    options.log_severity_level = FATAL_ONLY  # errors are raised, and a capture that fails is repeated
    if not wait:
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return options


def report_failed_capture(error: Exception) -> None:
    """Add a run that could not be captured to the file of failed captures, and log the first one of its kind."""
    reason = first_line(error)
    warn_once(f"A run is not captured as a GPU graph and takes longer: {reason}")
    with contextlib.suppress(OSError, InputError), (cache_folder() / FAILED_CAPTURES).open("a") as file:
        file.write(reason + "\n")


def failed_captures() -> list[str]:
    """Return the reasons of all captures that failed, in the order of their failures."""
    try:
        return (cache_folder() / FAILED_CAPTURES).read_text().splitlines()
    except (OSError, InputError):
        return []


T = TypeVar("T")


class ShapeCache(dict[Any, T]):
    """Values by input shapes, at most `MAX_SHAPES`; the least recently used one is dropped."""

    MAX_SHAPES = 8

    def get_or_make(self, key: Any, make: Callable[[], T], drop: Callable[[T], object] = lambda _: None) -> T:
        """Return the value of `key`, made if there is none; `drop` is called with a value that leaves the cache."""
        value = self.pop(key, None)
        if value is None:
            if len(self) == self.MAX_SHAPES:
                drop(self.pop(next(iter(self))))
            value = make()
        self[key] = value
        return value


class GpuGraphModel(OrtModel):
    """A component whose runs are captured: a `BoundRun` for each set of input shapes.

    A call copies its inputs to the buffers of their shapes, runs, and copies the outputs out.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        device: str = "cuda",
        lock: AbstractContextManager[Any] | None = None,
        stream: Stream | None = None,
    ) -> None:
        """`stream`: as of `BoundRun`. Without one the provider itself captures runs by their graph_id."""
        super().__init__(session, lock)
        self.device, self.stream = device, stream
        self.runs: ShapeCache[BoundRun] = ShapeCache()
        self.graph_ids = itertools.count()

    def __call__(self, **arrays: Any) -> dict[str, np.ndarray]:
        return self.run_with_shared({}, **arrays)

    def run_with_shared(self, shared: Mapping[str, np.ndarray], **arrays: Any) -> dict[str, np.ndarray]:
        arrays = {**shared, **arrays}
        self.check_names(arrays)
        feed = {name: np.ascontiguousarray(array, self.dtype(name)) for name, array in arrays.items()}
        with self.lock:
            bound = self.bind(feed)
            is_written = bound.shared is shared
            bound.shared = None  # until all of it is written
            for name, array in feed.items():
                if not (is_written and name in shared):
                    write_value(bound.inputs[name], array)
            bound.shared = shared
            bound.run()
            return {name: read_value(value) for name, value in bound.outputs.items()}

    def bind(self, feed: Mapping[str, np.ndarray]) -> BoundRun:
        """Return the cached run for the shapes of `feed`; the inputs of a new one have the values of `feed`."""
        key = tuple((name, array.shape) for name, array in sorted(feed.items()))
        return self.runs.get_or_make(key, lambda: self.capture(feed), BoundRun.release)

    def capture(self, feed: Mapping[str, Any], outputs: Mapping[str, Any] | None = None) -> BoundRun:
        """Return a captured run over `feed` and `outputs` as of `BoundRun`, which the caller keeps."""
        graph_id = NO_GRAPH_ID if self.stream is not None else next(self.graph_ids)
        return BoundRun(self.session, feed, self.device, stream=self.stream, graph_id=graph_id, outputs=outputs)


def open_gpu_graph_model(model: Path, provider: str, options: SessionOptions = DEFAULT_OPTIONS) -> GpuGraphModel:
    """Open a component on a stream of its own and return it as a captured one."""
    settings = dict(options.provider_options)
    stream = open_stream(provider, int(settings.get("device_id", 0)))
    if stream is not None:
        settings["user_compute_stream"] = str(stream.handle)
    session = create_session(model, provider, replace(options, provider_options=settings, capture=True))
    capture_stream = stream if stream is not None and stream.has_graphs else None
    return GpuGraphModel(session, provider_named(provider).device, stream=capture_stream)


def bind(model: OrtModel, feed: Mapping[str, Any], device: str, outputs: Mapping[str, Any] | None = None) -> BoundRun:
    """Return a run of `model` over `feed` and `outputs` as of `BoundRun`, captured if it is a `GpuGraphModel`."""
    if isinstance(model, GpuGraphModel):
        return model.capture(feed, outputs)
    return BoundRun(model.session, feed, device, outputs=outputs)
