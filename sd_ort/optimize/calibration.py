"""Calibration: runs a float32 graph to find values that come near the largest float16.

The lowered graph runs on ONNX Runtime's CPU provider with one additional output for each value, its largest magnitude,
so that activations are freed after their last consumer. No names are matched: float32 nodes of SDXL's VAE decoder,
whose activations exceed 65504, are detected from these magnitudes.
"""

from __future__ import annotations

import importlib.util
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from fusion_passes import DOMAIN
from fusion_passes.graph_edits import tensor_values
from fusion_passes.operators import BY_NAME, function_bodies
from fusion_passes.shapes.types import is_float32_output
from sd_ort.checkpoints.recorded_inputs import load_recorded_inputs
from sd_ort.checkpoints.synthetic_inputs import Arrays, random_inputs
from sd_ort.core import pipeline_folder
from sd_ort.core.errors import InputError, SdOrtError
from sd_ort.optimize.unoptimized import UnoptimizedComponent

# A value stays in float32 if it comes within this factor of the dtype's largest number: other prompts and noise change
# the extremes of an activation by a small factor (VAE decoders, other seeds: below 2).
MARGIN = 4.0
# Magnitudes from here on are no activations but a mask's minus infinity, which conversion clamps.
MASK_MAGNITUDE = float(np.finfo(np.float32).max) / 2
# Sizes of the synthetic inputs: few latent pixels, since the VAEs take time; multiples of 8, as the UNets need.
SYNTHETIC_SIZES = {"batch": 1, "sequence": 77, "height": 16, "width": 8, "image_sequence": 32, "windows": 2,
                   "patches": 64}  # fmt: skip
# Bytes of weights up to which a component runs by default: the VAEs and CLIP ViT-L, not the UNets.
SIZE_LIMIT = 1 << 30
MIN_SHARED_BYTES = 1 << 12  # of a weight that the session reads from memory instead of the file
INTERNAL_SUFFIX = ".inside"  # after an output's name: an intermediate value of the node's kernels


class CannotRun(InputError):
    """ONNX Runtime cannot run a graph; other InputErrors are about its checkpoint."""


@dataclass
class Calibration:
    """Result of a calibration.

    note: a summary. nodes: nodes that must stay in float32. sites: their values, with op, value and max_abs.
    """

    note: str
    nodes: set[ir.Node] = field(default_factory=set)
    sites: list[dict[str, Any]] = field(default_factory=list)


def calibrate(
    model: ir.Model,
    source: UnoptimizedComponent,
    scratch: Path,
    *,
    dtype: str = "float16",
    enabled: bool | None = None,
    recorded: Path | None = None,
) -> Calibration:
    """Run `model` (`source`, lowered, in float32) and return the nodes whose values `dtype` cannot represent.

    Args:
        scratch: Folder with space for the weights in float32.
        enabled: True runs models of any size, False none; None runs on recorded inputs, or on synthetic inputs if
            these are known for the model and its weights are within `SIZE_LIMIT`.
        recorded: An .npz of recorded inputs; used instead of synthetic inputs if it has any for this model.

    Raises:
        InputError: No inputs are known and `enabled` is True, or the model cannot be run.
    """
    name, inputs = source.name, list(model.graph.inputs)
    feeds = load_recorded_inputs(recorded, name, inputs)
    kind = "recorded" if feeds else "synthetic"
    reason = _skip_reason(model, enabled, bool(feeds))
    if reason is None and not feeds:
        try:
            feeds = [random_inputs(name, inputs, source.config(), SYNTHETIC_SIZES)]
        except InputError as error:
            if enabled:
                raise
            reason = str(error)
    if reason is not None:
        return Calibration(f"not calibrated: {reason}")
    try:
        ranges = measure(model, feeds, scratch)
    except CannotRun as error:
        raise InputError(
            f"{name} cannot be run on {kind} inputs ({error}): give --inputs, or --no-calibrate."
        ) from error
    limit = float(ml_dtypes.finfo(dtype).max) / MARGIN
    result = Calibration("")
    for node in model.graph:
        for output in node.outputs:
            highest = max(ranges.get(str(output.name), 0.0), ranges.get(f"{output.name}{INTERNAL_SUFFIX}", 0.0))
            if limit < highest < MASK_MAGNITUDE:
                result.nodes |= _around(output)
                site = {"op": node.op_type, "value": output.name, "max_abs": highest}
                result.sites.append({**site, "metadata": dict(node.metadata_props)})
    result.note = f"{len(result.sites)} of {len(ranges)} values exceed {limit:.0f} on {len(feeds)} {kind} inputs"
    return result


def recorded_calibration(model: ir.Model, names: Sequence[str]) -> Calibration:
    """Return the calibration that found the values `names` of `model`, without running it."""
    if names:
        common.NameFixPass()(model)
    values = {str(output.name): output for node in model.graph for output in node.outputs}
    ranges = [values[name] for name in names if name in values]
    return Calibration("", {node for value in ranges for node in _around(value)}, [{"value": v.name} for v in ranges])


def _around(value: ir.Value) -> set[ir.Node]:
    """Return the producer and the consumers of a value that a node computes."""
    producer = value.producer()
    assert producer is not None
    return {producer, *value.consumers()}


def measure(model: ir.Model, feeds: Sequence[Arrays], scratch: Path) -> dict[str, float]:
    """Return name -> largest magnitude, over `feeds`, of every float32 value that a node of `model` computes.

    Intermediate values that kernels may round have the name of the output and `INTERNAL_SUFFIX`. NaN counts as
    infinite. A copy of the model is run, see `run_model`. Raises CannotRun.
    """
    common.NameFixPass()(model)
    copy = model.clone()
    names = _add_ranges(copy)
    ranges = dict.fromkeys(names, 0.0)
    for outputs in run_model(copy, feeds, scratch):
        for name in names:
            highest = float(outputs[f"{name}.range"])
            ranges[name] = max(ranges[name], math.inf if np.isnan(highest) else highest)
    return ranges


def run_model(model: ir.Model, feeds: Sequence[Arrays], scratch: Path) -> Iterator[Arrays]:
    """Yield the outputs of a model for each of `feeds`, on the CPU. Raises CannotRun.

    The model is changed. It is written below `scratch` and removed, with its weights if they are above `SIZE_LIMIT`;
    links to the source's files would be visible to other readers.
    """
    from sd_ort.runtime.ort_values import host_value
    from sd_ort.runtime.session import ModelOverride, OrtModel, SessionOptions, create_session

    function_bodies.attach(model, [node for node in model.graph if node.domain == DOMAIN])
    with tempfile.TemporaryDirectory(prefix=".calibration-", dir=scratch) as work:
        path = Path(work) / "component" / pipeline_folder.MODEL
        path.parent.mkdir()
        small = weight_bytes(model) <= SIZE_LIMIT
        weights = _shared_weights(model, path.with_name(pipeline_folder.DATA)) if small else {}
        ir.save(model, path, external_data=None if weights else pipeline_folder.DATA)
        shared = {name: host_value(array) for name, array in weights.items()}
        options = SessionOptions(library=False, skip_optimization=True)
        try:
            run = OrtModel(create_session(path, "cpu", options, ModelOverride(updatable=shared)))
            for feed in feeds:
                yield run(**feed)
        except SdOrtError as error:
            raise CannotRun(str(error)) from error


def _shared_weights(model: ir.Model, data: Path) -> Arrays:
    """Return large float32 weights by name. In `model` they become external data in `data`, a sparse file."""
    weights: Arrays = {}
    size = 0
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        assert tensor is not None
        array = tensor_values(tensor)
        if tensor.dtype == ir.DataType.FLOAT and tensor.nbytes > MIN_SHARED_BYTES:
            shape, weights[name] = ir.Shape(array.shape), np.ascontiguousarray(array)
            value.const_value = ir.ExternalTensor(
                data.name, size, array.nbytes, tensor.dtype, shape=shape, name=name, base_dir=str(data.parent)
            )
            size += array.nbytes
        elif isinstance(tensor, ir.ExternalTensor):
            value.const_value = ir.Tensor(array, dtype=tensor.dtype, name=name)
    with data.open("wb") as file:
        file.truncate(size)
    return weights


def _add_ranges(model: ir.Model) -> list[str]:
    """Replace the graph's outputs by one scalar, max |x|, for every float32 value; return the names of these values."""
    names = []
    graph = model.graph
    for node in [node for node in graph if node.domain == DOMAIN]:
        if (internal_node := BY_NAME[node.op_type].internal_node) is not None:
            internal = internal_node(node)
            internal.outputs[0].name, internal.outputs[0].type = (
                f"{node.outputs[0].name}{INTERNAL_SUFFIX}",
                node.outputs[0].type,
            )
            graph.append(internal)
    values = [v for node in graph for i, v in enumerate(node.outputs) if not is_float32_output(node, i)]
    read = [v for v in values if v.uses() or v.is_graph_output() or str(v.name).endswith(INTERNAL_SUFFIX)]
    used = [v for v in read if v.dtype == ir.DataType.FLOAT]
    graph.outputs.clear()
    for value in used:
        highest = append_magnitude(graph, value)[1]
        graph.outputs.append(highest)
        names.append(str(value.name))
    return names


def append_magnitude(graph: ir.Graph, value: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Append nodes to a graph; return |value|, and the largest element of it as "<name>.range", NaN if one is NaN.

    ONNX Runtime's ReduceMax is NaN only if the first element is. A sum of magnitudes is NaN if any is.
    """

    def add(op_type: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        node = ir.node(op_type, inputs, attributes)
        node.outputs[0].name = f"{value.name}.{op_type.lower()}"
        graph.append(node)
        return node.outputs[0]

    magnitude = add("Abs", value)
    total = add("ReduceL1", value, keepdims=0)
    highest = add("Where", add("IsNaN", total), total, add("ReduceMax", magnitude, keepdims=0))
    highest.name, highest.dtype, highest.shape = f"{value.name}.range", ir.DataType.FLOAT, ir.Shape([])
    return magnitude, highest


def _skip_reason(model: ir.Model, enabled: bool | None, recorded: bool) -> str | None:
    if enabled is False:
        return "switched off"
    if importlib.util.find_spec("onnxruntime") is None:
        return "onnxruntime is not installed"
    size = weight_bytes(model)
    if enabled is None and not recorded and size > SIZE_LIMIT:
        return f"its {size / 1e9:.1f} GB are above {SIZE_LIMIT / 1e9:.1f} GB; --calibrate runs it all the same"
    return None


def weight_bytes(model: ir.Model) -> int:
    """Return the size of a model's weights."""
    tensors = [value.const_value for value in model.graph.initializers.values()]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
