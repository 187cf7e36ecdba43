"""Merges a pipeline into one ONNX model, from token ids and noise to the image.

    input_ids, negative_ids -> text encoder(s) -+
    latents -----------------------------------> Loop over steps: UNet, guidance, scheduler -> VAE decoder -> image

The model has one session and one memory arena. The scheduler is a matrix (see `checkpoints.schedule`), an input with a
default, so that the number of steps and the scheduler can be changed at run time. Parts of a hoisted UNet that run once
run before the loop. Weights are copied from file to file one tensor at a time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from fusion_passes.graph_edits import new_initializer
from sd_ort.checkpoints.conditioning import embedding_output, latent_scale, text_encoders
from sd_ort.checkpoints.configs import component_config
from sd_ort.checkpoints.generation_defaults import generation_defaults
from sd_ort.checkpoints.linear_schedule import LinearSchedule, fixed_schedule
from sd_ort.checkpoints.schedule import DiffusersTimetable
from sd_ort.checkpoints.schedulers import make_scheduler
from sd_ort.core import pipeline_folder
from sd_ort.core.aliases import accept_old_names
from sd_ort.core.denoiser_graphs import DenoiserGraphs
from sd_ort.core.errors import InputError
from sd_ort.core.package_version import package_version
from sd_ort.core.paths import output_path
from sd_ort.core.progress import ProgressCallback, ignore_progress
from sd_ort.graphs import hoist
from sd_ort.graphs import merged_loop_graphs as loop_graphs
from sd_ort.graphs.inline import inline
from sd_ort.graphs.load import load
from sd_ort.graphs.save import save
from sd_ort.graphs.unet import make_timestep_1d

FLOAT = ir.DataType.FLOAT


@accept_old_names(report="on_progress")
def merge(
    source: Path,
    output: Path,
    *,
    steps: int | None = None,
    guidance: float | None = None,
    scheduler: str | None = None,
    overwrite: bool = False,
    on_progress: ProgressCallback = ignore_progress,
) -> dict[str, Any]:
    """Write the text-to-image pipeline of `source` to `output` as `pipeline/model.onnx`, and return its manifest.

    `steps`, `guidance` and `scheduler` are the defaults of the model's inputs timesteps, scales, weights and
    guidance_scale; None is the default of the folder. `overwrite`: replace files in `output` that were changed
    since sd-ort wrote them. `report` is the old name of `on_progress`. After an error, no files remain.

    Raises:
        InputError: `source` is no text-to-image pipeline, its components have different opsets, or the scheduler is not
            linear.
        OutputError: `output` cannot be written.
    """
    output_path(output, source)
    defaults = generation_defaults(source)
    steps, guidance = steps or defaults.steps, defaults.guidance if guidance is None else guidance
    index = pipeline_folder.read_index(source)
    available = pipeline_folder.components(source)
    names = [*text_encoders(index), "unet", "vae_decoder"]
    if "controlnet" in available or component_config(source, "unet", required=True).get("in_channels", 4) != 4:
        raise InputError(f"{source} generates from images: only a text-to-image pipeline can be merged.")
    names += [hoist.PARTS["prompt"], hoist.PARTS["time"]] if hoist.is_hoisted(source) else []
    parts = {name: load(pipeline_folder.check_component(source, name)) for name in names}
    input_names = {str(value.name) for part in parts.values() for value in part.graph.inputs}
    if unsupported := input_names & {"timestep_cond", "class_labels", "image_embeds"}:
        raise InputError(
            f"{source} has a UNet that takes {', '.join(unsupported)}, which a merged model has no input for."
        )
    if "timestep" in {value.name for value in parts["unet"].graph.inputs} and not make_timestep_1d(parts["unet"]):
        raise InputError(f"{source} has a UNet that computes with its timestep, which has no axis, at once.")
    instance = make_scheduler(source, scheduler)
    schedule = fixed_schedule(DiffusersTimetable(instance, steps, 0.0))
    model = _Merger(parts, component_config(source, "vae_decoder", required=True), schedule, guidance).model
    description = pipeline_folder.read_manifest(source).get("source", {})
    manifest = {
        "stage": "merge",
        "source": {**description, "folder": str(source.resolve())},
        "versions": {name: package_version(name) for name in ("sd-ort", "onnx", "onnx-ir", "diffusers")},
        "options": {"steps": steps, "guidance": guidance, "scheduler": type(instance).__name__},
        "components": {pipeline_folder.MERGED: {"nodes": sum(1 for _ in model.graph.all_nodes()), "merged": names}},
    }
    with pipeline_folder.staged(output, source, overwrite=overwrite, on_progress=on_progress) as work:
        pipeline_folder.copy_configs(source, work, names)
        (work / "scheduler").mkdir(exist_ok=True)
        scheduler_config = work / "scheduler" / "scheduler_config.json"
        config = {**dict(instance.config), "_class_name": type(instance).__name__}
        scheduler_config.write_text(json.dumps(config, indent=2, default=str) + "\n")
        save(model, work / pipeline_folder.MERGED / pipeline_folder.MODEL)
        pipeline_folder.write_manifest(work, manifest)
    on_progress(f"Wrote {output}: {', '.join(names)} as one model.")
    return pipeline_folder.read_manifest(output)


class _Merger:
    """Builds the merged model, `model`."""

    def __init__(
        self, parts: Mapping[str, ir.Model], vae: Mapping[str, Any], schedule: LinearSchedule, guidance: float
    ) -> None:
        self.parts = parts
        unet = parts["unet"]
        self.opset = unet.graph.opset_imports[""]
        self.graph = ir.Graph([], [], nodes=[], opset_imports={"": self.opset}, name=pipeline_folder.MERGED)
        self.model = ir.Model(self.graph, ir_version=max(part.ir_version for part in parts.values()))
        self.is_sdxl = "time_ids" in {v.name for part in parts.values() for v in part.graph.inputs}

        conditioning = self._encode()
        latents = self._input("latents", ["batch", 4, "height", "width"])
        self.timesteps = self._input("timesteps", ["steps"], schedule.timesteps)
        self.scales = self._input("scales", ["steps"], schedule.input_scales)
        self.weights = self._input("weights", ["states", "states"], schedule.weights)
        self.guidance = self._input("guidance_scale", [1], np.array([guidance], np.float32))
        fixed, by_step = self._hoisted(conditioning)
        history = self._call(loop_graphs.INIT_HISTORY, "first.", latents=latents, timesteps=self.timesteps)["history"]
        history = self._loop(history, fixed, by_step)
        last = self._node("Shape", [self.timesteps])
        latents = self._call(loop_graphs.LATENTS, "last.", history=history, index=last, weights=self.weights)["latents"]
        self._decode(latents, vae)

    # --- The stages -------------------------------------------------------------------------------------------------

    def _encode(self) -> dict[str, ir.Value]:
        """Return the UNet's conditioning inputs of 2B batch rows, negative first."""
        hidden, conditioning = [], {}
        for name in (name for name in self.parts if name.startswith("text_encoder")):
            suffix = name.removeprefix("text_encoder")
            ids = [
                self._input(f"{kind}_ids{suffix}", ["batch", "sequence"], dtype=ir.DataType.INT64)
                for kind in ("negative", "input")
            ]
            outputs = inline(self.model, self.parts[name], {"input_ids": self._node("Concat", ids, axis=0)}, f"{name}.")
            hidden.append(outputs[embedding_output(outputs, self.is_sdxl)])
            if "text_embeds" in outputs:
                conditioning["text_embeds"] = outputs["text_embeds"]
        conditioning["encoder_hidden_states"] = self._node("Concat", hidden, axis=2) if len(hidden) > 1 else hidden[0]
        if not self.is_sdxl:
            return conditioning
        # SDXL's unconditional rows are zeros without a negative prompt.
        strength = self._input("negative_strength", [1], np.zeros(1, np.float32))
        for name, value in conditioning.items():
            conditioning[name] = self._scale_negative(value, strength)
        sizes = self._input("time_ids", ["batch", 6])
        conditioning["time_ids"] = self._node("Concat", [sizes, sizes], axis=0)
        return conditioning

    def _hoisted(self, conditioning: Mapping[str, ir.Value]) -> tuple[dict[str, ir.Value], dict[str, ir.Value]]:
        """Return (conditioning with the prompt graph's outputs, outputs (T, batch rows, ...) of the time graph)."""
        graphs = DenoiserGraphs("unet", self.parts, self._inputs, self._inline)
        fixed = {**conditioning, **graphs.prompt_outputs(conditioning)}
        if not graphs.is_hoisted:
            return fixed, {}
        rows = self._node("Shape", [conditioning["encoder_hidden_states"]], start=0, end=1)
        steps = self._node("Shape", [self.timesteps])
        grid = self._node("Concat", [steps, rows], axis=0)
        column = self._node("Reshape", [self.timesteps, self._ints([-1, 1])])
        spread = self._node("Expand", [column, grid])
        timestep = self._node("Reshape", [spread, self._ints([-1])])

        def repeat(values: dict[str, ir.Value]) -> dict[str, ir.Value]:
            repeated = {}
            for name, value in values.items():
                tail = self._node("Shape", [value], start=1)
                expanded = self._node("Expand", [value, self._node("Concat", [grid, tail], axis=0)])
                shape = self._node("Concat", [self._ints([-1]), tail], axis=0)
                repeated[name] = self._node("Reshape", [expanded, shape])
            return repeated

        by_step = {}
        for name, value in graphs.time_outputs(fixed, timestep, repeat).items():
            tail = self._node("Shape", [value], start=1)
            by_step[name] = self._node("Reshape", [value, self._node("Concat", [grid, tail], axis=0)])
        return fixed, by_step

    def _loop(self, history: ir.Value, fixed: Mapping[str, ir.Value], by_step: Mapping[str, ir.Value]) -> ir.Value:
        """Return the history after all steps. The UNet's weights are in the body of the loop."""
        unet = self.parts["unet"]
        fixed = self._cast_all(unet, fixed)
        by_step = self._cast_all(unet, by_step)
        steps = self._node("Squeeze", [self._node("Shape", [self.timesteps])])
        outer, self.graph = self.graph, ir.Graph([], [], nodes=[], opset_imports={"": self.opset}, name="step")
        number = _value("step.number", [], ir.DataType.INT64)
        go_on = _value("step.go_on", [], ir.DataType.BOOL)
        carried = _value("step.history", [None] * 5, FLOAT)
        self.graph.inputs.extend([number, go_on, carried])
        index = self._node("Reshape", [number, self._ints([1])])
        latents = self._call(loop_graphs.LATENTS, "step.", history=carried, index=index, weights=self.weights)[
            "latents"
        ]
        inputs = self._call(
            loop_graphs.UNET_INPUT, "input.", latents=latents, index=index, scales=self.scales, timesteps=self.timesteps
        )
        inputs["sample"] = self._call(loop_graphs.DUPLICATE_ROWS, "input.", sample=inputs["sample"])["rows"]
        now = {name: self._node("Gather", [value, number], axis=0) for name, value in by_step.items()}
        feed = {**fixed, **now, **self._cast_all(unet, inputs)}
        feed = {name: feed[name] for name in self._inputs("unet")}
        noise = inline(self.model, unet, feed, "unet.", into=self.graph)["out_sample"]
        noise = self._as(noise, FLOAT)
        guided = self._call(loop_graphs.APPLY_GUIDANCE, "guide.", noise=noise, guidance=self.guidance)["guided"]
        record = self._call(loop_graphs.APPEND_PREDICTION, "record.", prediction=guided, history=carried, index=index)
        self.graph.outputs.extend([self._node("Identity", [go_on]), record["history_out"]])
        body, self.graph = self.graph, outer
        for value, dtype in zip(body.outputs, (ir.DataType.BOOL, FLOAT), strict=True):
            value.dtype = dtype
        return self._node("Loop", [steps, None, history], body=body)

    def _decode(self, latents: ir.Value, config: Mapping[str, Any]) -> None:
        """Add the output `image` (B, 3, H, W), float32, 0..1."""
        mean, factor = (
            new_initializer(self.graph, f"vae.{name}", np.asarray(values, np.float32).reshape(1, -1, 1, 1))
            for name, values in zip(("mean", "factor"), latent_scale(config), strict=True)
        )
        scaled = self._node("Add", [self._node("Mul", [latents, factor]), mean])
        vae = self.parts["vae_decoder"]
        inputs = self._cast_all(vae, {"latent_sample": scaled})
        sample = self._as(inline(self.model, vae, inputs, "vae_decoder.")["sample"], FLOAT)
        half = new_initializer(self.graph, "image.half", np.float32(0.5).reshape(1))
        shifted = self._node("Add", [self._node("Mul", [sample, half]), half])
        zero, one = (new_initializer(self.graph, f"image.{n}", np.array(n, np.float32)) for n in (0, 1))
        image = self._node("Clip", [shifted, zero, one])
        image.name, image.dtype, image.shape = "image", FLOAT, ir.Shape(["batch", 3, "height*8", "width*8"])
        self.graph.outputs.append(image)

    # --- Small steps ------------------------------------------------------------------------------------------------

    def _input(
        self, name: str, shape: list[Any], default: np.ndarray | None = None, dtype: ir.DataType = FLOAT
    ) -> ir.Value:
        """Add a graph input, which is optional if it has a `default`."""
        value = _value(name, shape, dtype)
        self.graph.inputs.append(value)
        if default is not None:
            value.const_value = ir.tensor(default, name=name)
            self.graph.register_initializer(value)
        return value

    def _node(self, op: str, inputs: Sequence[ir.Value | None], **attributes: Any) -> ir.Value:
        node = ir.node(op, inputs, attributes)
        node.outputs[0].name = f"{self.graph.name}.{op}.{len(self.graph)}"
        first = inputs[0]
        dtype = FLOAT if op == "Loop" or first is None else ir.DataType.INT64 if op == "Shape" else first.dtype
        if dtype is not None:
            node.outputs[0].dtype = dtype
        self.graph.append(node)
        return node.outputs[0]

    def _inputs(self, part: str) -> list[str]:
        return [str(value.name) for value in self.parts[part].graph.inputs]

    def _inline(self, part: str, feed: Mapping[str, ir.Value]) -> dict[str, ir.Value]:
        model = self.parts[part]
        return inline(self.model, model, self._cast_all(model, feed), f"{part}.")

    def _call(self, text: str, prefix: str, **inputs: ir.Value) -> dict[str, ir.Value]:
        return inline(self.model, loop_graphs.parse_graph(text, self.opset), inputs, prefix, into=self.graph)

    def _ints(self, numbers: list[int]) -> ir.Value:
        name = f"{self.graph.name}.ints.{'_'.join(map(str, numbers))}"
        value = self.graph.initializers.get(name)
        return new_initializer(self.graph, name, numbers) if value is None else value

    def _as(self, value: ir.Value, dtype: ir.DataType | None) -> ir.Value:
        if value.dtype == dtype or dtype is None:
            return value
        cast = self._node("Cast", [value], to=int(dtype))
        cast.dtype = dtype
        return cast

    def _cast_all(self, part: ir.Model, values: Mapping[str, ir.Value]) -> dict[str, ir.Value]:
        """Return the inputs of `part` among `values`, in its dtypes."""
        dtypes = {str(v.name): v.dtype for v in part.graph.inputs}
        return {name: self._as(value, dtypes[name]) for name, value in values.items() if name in dtypes}

    def _scale_negative(self, value: ir.Value, strength: ir.Value) -> ir.Value:
        """Multiply the first half of the batch rows by `strength` (1,)."""
        split = ir.node("Split", [value], {"axis": 0, "num_outputs": 2}, num_outputs=2)
        for half, output in zip(("negative", "positive"), split.outputs, strict=True):
            output.name, output.type = f"{value.name}.{half}", value.type
        self.graph.append(split)
        negative = self._node("Mul", [split.outputs[0], self._as(strength, value.dtype)])
        return self._node("Concat", [negative, split.outputs[1]], axis=0)


def _value(name: str, shape: list[Any], dtype: ir.DataType) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
