"""The sampling loop on the device: between two UNet calls nothing is copied to the host.

The UNet reads and writes buffers with fixed addresses. Guidance, the scheduler (a matrix, see `family.schedule`) and
the next step's input are one small ONNX graph, which runs on the same provider and writes into the UNet's own input
buffers; the step's number lies on the device too. So a step is two calls without arguments, and the UNet's may be
the replay of a captured graph (`session.GraphModel`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from sd_ort.core.progress import step_bar
from sd_ort.graphs import sampling_step
from sd_ort.graphs.inline import inline
from sd_ort.runtime.captured import BoundShapes, GraphModel
from sd_ort.runtime.session import Model
from sd_ort.runtime.wheels import runtime

if TYPE_CHECKING:
    from sd_ort.family.schedule import LinearSchedule
    from sd_ort.pipeline.denoiser import Denoiser

Arrays = dict[str, np.ndarray]
OPSET = 18


class DeviceLoop:
    """Runs all steps of a linear schedule. `device`: ONNX Runtime's name for the memory, "cuda" (AMD too) or "cpu"."""

    def __init__(self, models: Mapping[str, Model], device: str) -> None:
        """Nothing is opened yet. Buffers are kept from one `run` to the next while shapes stay the same."""
        self.models = models
        self.device = device
        self.bound: tuple[Any, BoundShapes] | None = None
        self.glue: dict[Any, tuple[Any, Any]] = {}

    def run(
        self,
        latents: np.ndarray,
        denoiser: Denoiser,
        schedule: LinearSchedule,
        guidance: float | None,
        progress: bool = False,
    ) -> np.ndarray:
        """Latents (B, C, h, w), float32, as the first step takes them -> as the last step leaves them.

        `denoiser` holds the UNet's other inputs, of 2B rows with `guidance` (negative first), of B with None.
        """
        unet = self.models["unet"]
        rows = len(latents) * (1 if guidance is None else 2)
        by_step = {name: np.concatenate([v, v[-1:]]) for name, v in denoiser.by_step.items()}
        feed = {"sample": np.zeros((rows, *latents.shape[1:])), "timestep": np.zeros(1), **denoiser.fixed}
        feed |= {name: values[0] for name, values in by_step.items()}
        bound = self._bind(unet, {name: np.ascontiguousarray(feed[name], unet.dtype(name)) for name in unet.inputs})

        constants = _constants(schedule, guidance)
        constants |= {f"every.{name}": values.astype(unet.dtype(name)) for name, values in by_step.items()}
        values = {name: self._value(array) for name, array in constants.items()}
        values["latents"] = self._value(np.zeros_like(latents))
        if "timestep" not in bound.inputs:
            values["timestep"] = self._value(np.zeros(1, np.float32))
        values |= {"noise": bound.outputs["out_sample"], **bound.inputs}

        steps = len(schedule.timesteps)
        history = np.zeros((steps + 1, *latents.shape), np.float32)
        history[0] = latents
        # Two of each: a step reads one and writes the other. Bindings do not keep host arrays alive, this frame does.
        states = [self._value(history), self._value(np.zeros_like(history))]
        numbers = [self._value(np.array([0], np.int64)), self._value(np.array([0], np.int64))]
        start, step = self._sessions(unet, guidance is not None, list(by_step))
        first = self._binding(start, {**values, "history": states[0], "index": numbers[0]})
        turns = []
        for old, new in ((0, 1), (1, 0)):
            read = {"history": states[old], "index": numbers[old]}
            written = {"history_out": states[new], "index_out": numbers[new]}
            turns.append(self._binding(step, {**values, **read, **written}))
        start.run_with_iobinding(first)
        with step_bar(range(steps), progress) as bar:
            for number in bar:
                bound.run()
                step.run_with_iobinding(turns[number % 2])
        result: np.ndarray = values["latents"].numpy()
        return result.copy()  # on the CPU it is a view of the buffer

    # --- Buffers ----------------------------------------------------------------------------------------------------

    def _value(self, array: np.ndarray) -> Any:
        return runtime().OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array), self.device, 0)

    def _bind(self, unet: Model, feed: Arrays) -> BoundShapes:
        """The UNet's buffers for inputs of these shapes, holding `feed`."""
        key = (id(unet), *((name, array.shape) for name, array in feed.items()))
        if isinstance(unet, GraphModel):
            bound = unet.bind(feed)
        elif self.bound is not None and self.bound[0] == key:
            bound = self.bound[1]
        else:
            self.bound = None  # the old buffers go before the new ones come
            bound = BoundShapes(unet.session, feed, self.device, 0)
            self.bound = key, bound
        for name, array in feed.items():
            bound.inputs[name].update_inplace(array)
        return bound

    def _binding(self, session: Any, values: Mapping[str, Any]) -> Any:
        binding = session.io_binding()
        for value in session.get_inputs():
            binding.bind_ortvalue_input(value.name, values[value.name])
        for value in session.get_outputs():
            binding.bind_ortvalue_output(value.name, values[value.name])
        return binding

    # --- The graphs between two UNet calls --------------------------------------------------------------------------

    def _sessions(self, unet: Model, guided: bool, by_step: list[str]) -> tuple[Any, Any]:
        """(the graph before the first step, the graph after each step), on the UNet's provider."""
        key = (id(unet), guided)
        if key not in self.glue:
            dtypes = {name: ir.DataType.from_numpy(np.dtype(unet.dtype(name))) for name in ("sample", *by_step)}
            models = [glue(dtypes, guided, record=record) for record in (False, True)]
            first, last = (self._open(model, unet.session) for model in models)
            self.glue = {key: (first, last)}
        return self.glue[key]

    def _open(self, model: ir.Model, unet: Any) -> Any:
        onnxruntime = runtime()
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        given = unet.get_provider_options()
        wanted = []
        for name in unet.get_providers():
            kept = {key: value for key, value in given.get(name, {}).items() if key == "device_id"}
            if given.get(name, {}).get("has_user_compute_stream") == "1":
                kept["user_compute_stream"] = given[name]["user_compute_stream"]
            wanted.append((name, kept))
        return onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=wanted)


def _constants(schedule: LinearSchedule, guidance: float | None) -> Arrays:
    """What the graphs read of a schedule, with one entry more than steps: the input of a step that is not made."""
    constants = {
        "weights": schedule.weights,
        "scales": np.append(schedule.scales, schedule.scales[-1:]),
        "timesteps": np.append(schedule.timesteps, schedule.timesteps[-1:]),
    }
    return constants if guidance is None else {**constants, "guidance": np.array([guidance], np.float32)}


def glue(dtypes: Mapping[str, ir.DataType], guided: bool, *, record: bool) -> ir.Model:
    """The graph between two UNet calls; without `record`, the one before the first.

    `dtypes`: those of the UNet's input `sample`, which its output shares, and of inputs that change with the step
    beside it. Inputs: history, index, weights, scales, timesteps, `every.<name>` (T + 1, ...) of each such input, and
    to record noise [, guidance]. Outputs: latents, sample, timestep, each `<name>`, and history_out, index_out.
    """
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="glue")
    model = ir.Model(graph, ir_version=10)
    shapes: dict[str, tuple[list[Any], ir.DataType]] = {
        "history": (["t1", "b", "c", "h", "w"], ir.DataType.FLOAT),
        "index": ([1], ir.DataType.INT64),
        "weights": (["t1", "t1"], ir.DataType.FLOAT),
        "scales": (["t1"], ir.DataType.FLOAT),
        "timesteps": (["t1"], ir.DataType.FLOAT),
    }
    if record:
        shapes["noise"] = ["rows", "c", "h", "w"], dtypes["sample"]
        if guided:
            shapes["guidance"] = [1], ir.DataType.FLOAT
    values = {name: ir.Value(name=name, shape=ir.Shape(s), type=ir.TensorType(t)) for name, (s, t) in shapes.items()}
    graph.inputs.extend(values.values())
    outputs: dict[str, ir.Value] = {}

    def call(text: str, prefix: str, **inputs: ir.Value) -> dict[str, ir.Value]:
        return inline(model, sampling_step.graph(text, OPSET), inputs, f"{prefix}.")

    def node(op: str, inputs: list[ir.Value], dtype: ir.DataType, **attributes: Any) -> ir.Value:
        made = ir.node(op, inputs, attributes)
        made.outputs[0].name, made.outputs[0].type = f"{op}.{len(graph)}", ir.TensorType(dtype)
        graph.append(made)
        return made.outputs[0]

    history, index = values["history"], values["index"]
    if record:
        noise = node("Cast", [values["noise"]], ir.DataType.FLOAT, to=int(ir.DataType.FLOAT))
        if guided:
            noise = call(sampling_step.GUIDE, "guide", noise=noise, guidance=values["guidance"])["guided"]
        outputs |= call(sampling_step.RECORD, "record", noise=noise, history=history, index=index)
        history, index = outputs["history_out"], outputs["index_out"]
    outputs |= call(sampling_step.LATENTS, "latents", history=history, index=index, weights=values["weights"])
    told = {"scales": values["scales"], "timesteps": values["timesteps"], "index": index}
    outputs |= call(sampling_step.INPUT, "input", latents=outputs["latents"], **told)
    if guided:
        outputs["sample"] = call(sampling_step.TWICE, "twice", sample=outputs["sample"])["rows"]
    outputs["sample"] = node("Cast", [outputs["sample"]], dtypes["sample"], to=int(dtypes["sample"]))
    for name, dtype in dtypes.items():
        if name != "sample":
            every = ir.Value(name=f"every.{name}", type=ir.TensorType(dtype))
            graph.inputs.append(every)
            scalar = node("Squeeze", [index], ir.DataType.INT64)
            outputs[name] = node("Gather", [every, scalar], dtype, axis=0)
    for name, value in outputs.items():
        value.name = name
        graph.outputs.append(value)
    return model
