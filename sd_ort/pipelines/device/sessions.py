"""ONNX Runtime sessions bound to buffers on one device: components, and the small graphs between them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from sd_ort.core.denoiser_graphs import DenoiserGraphs
from sd_ort.runtime.bound_run import NO_GRAPH_ID, BoundRun, bind
from sd_ort.runtime.ort_values import device_value, empty_value
from sd_ort.runtime.partitioned import PartitionedModel, is_captured
from sd_ort.runtime.session import open_graph

if TYPE_CHECKING:
    from sd_ort.runtime.components import Components
    from sd_ort.runtime.session import OrtModel


class DeviceSessions:
    """Allocates buffers on the components' device and binds sessions to them.

    `wait`: whether every run waits for the device, which sessions that read inputs on the host require.
    """

    def __init__(self, models: Components) -> None:
        """Open nothing yet."""
        self.models = models
        self.wait = False
        self._graphs: dict[Any, Any] = {}  # sessions of small graphs
        self._graph_ids = itertools.count()

    def value(self, array: Any) -> Any:
        """Return an OrtValue on the device with a copy of `array`."""
        return device_value(array, self.models.device)

    def empty(self, shape: Any, dtype: Any) -> Any:
        """Return an uninitialized OrtValue on the device."""
        return empty_value(shape, dtype, self.models.device)

    def bind(self, model: OrtModel, feed: Mapping[str, Any], outputs: Mapping[str, Any] | None = None) -> BoundRun:
        """Bind a component to OrtValues by name; the run is captured if the component's session captures."""
        feed = {name: feed[name] for name in model.inputs}
        if isinstance(model, PartitionedModel):
            bound: BoundRun = model.bind(feed)
        else:
            bound = bind(model, feed, self.models.device, outputs)
        self.wait |= bool(bound.host_inputs)
        return bound

    def graph(
        self, build: Callable[[Any], bytes], key: Any, values: Mapping[str, Any], *, capture: bool = False
    ) -> BoundRun:
        """Bind the graph `build(key)` to the `values` of its inputs and outputs.

        A session is opened once per graph. `capture`: replay the run, because launching its kernels takes longer than
        they run.
        """
        name = (build.__name__, key, capture)
        if name not in self._graphs:
            options = self.models.options.provider_options
            options = {k: v for k, v in options.items() if k in ("device_id", "user_compute_stream")}
            provider = "cpu" if self.models.device == "cpu" else self.models.provider
            self._graphs[name] = open_graph(build(key), provider, options, capture=capture)
        session = self._graphs[name]
        inputs = {value.name: values[value.name] for value in session.get_inputs()}
        outputs = {value.name: values[value.name] for value in session.get_outputs() if value.name in values}
        stream = self.models.target.capture_stream if capture else None
        graph_id = next(self._graph_ids) if capture and stream is None else NO_GRAPH_ID
        return BoundRun(session, inputs, self.models.device, stream=stream, graph_id=graph_id, outputs=outputs)

    def step_graph(self, build: Callable[[Any], bytes], key: Any, values: Mapping[str, Any], unet: str) -> BoundRun:
        """As `graph`, captured if the U-Net is. `unet`: its key."""
        return self.graph(build, key, values, capture=is_captured(self.models[unet]))


class BoundDenoiserGraphs(DenoiserGraphs[Any]):
    """Runs of the folder's U-Net graphs over OrtValues. runs: bound runs by component."""

    def __init__(self, sessions: DeviceSessions) -> None:
        self.sessions, self.runs = sessions, dict[str, BoundRun]()
        super().__init__("unet", sessions.models, lambda name: sessions.models[name].inputs, self._bind)

    def _bind(self, component: str, feed: Mapping[str, Any]) -> Mapping[str, Any]:
        run = self.runs[component] = self.sessions.bind(self.sessions.models[component], feed)
        return run.outputs
