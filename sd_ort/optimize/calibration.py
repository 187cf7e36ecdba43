"""Calibration: which values of a float32 graph come too near the largest float16, found by running the graph.

The lowered graph runs once on ONNX Runtime's CPU provider with one more output a value, its largest magnitude, so that
no activation outlives its readers. Nothing is matched by name: SDXL's VAE decoder, whose activations exceed 65504,
keeps its float32 sites for the numbers they have.
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
from sd_ort.core import folder
from sd_ort.core.errors import InputError, SdOrtError
from sd_ort.family.inputs import Arrays, random_inputs
from sd_ort.family.recorded import recorded_inputs
from sd_ort.optimize.raw import Raw

# A value stays in float32 when it came within this factor of the type's largest number: other prompts and noise move
# the extremes of an activation by a small factor (VAE decoders, other seeds: below 2).
MARGIN = 4.0
# Larger numbers, infinity too, are no activations but a mask's minus infinity, which conversion clamps or keeps.
MASK = float(np.finfo(np.float32).max) / 2
# Latent pixels of the made-up run: few, since the VAEs take time; multiples of 8 as the UNets need.
CALIBRATED = {"batch": 1, "sequence": 77, "height": 16, "width": 8}
# Bytes of weights up to which a component is run unasked: the VAEs and CLIP ViT-L, not the UNets.
SIZE_LIMIT = 1 << 30
LARGE = 1 << 12  # bytes of a weight that is run from memory
INSIDE = ".inside"  # behind an output's name: what its node's kernels may write on the way


class CannotRun(InputError):
    """ONNX Runtime refuses a graph, or fails on it: not that its checkpoint cannot be read."""


@dataclass
class Calibration:
    """`nodes` must stay in float32; `sites` says why: one entry a value, with op, value, max_abs. `note` sums it up."""

    note: str
    nodes: set[ir.Node] = field(default_factory=set)
    sites: list[dict[str, Any]] = field(default_factory=list)


def calibrate(
    model: ir.Model,
    source: Raw,
    scratch: Path,
    *,
    dtype: str = "float16",
    wanted: bool | None = None,
    recorded: Path | None = None,
) -> Calibration:
    """Run `model` (lowered, still float32, made from `source`) and find what `dtype` cannot hold.

    `wanted`: True to run it whatever its size, False to leave it, None to run it on recorded inputs, or made-up ones
    where `SIZE_LIMIT` allows and its inputs can be made up. `recorded`: an .npz of real inputs to take instead of
    made-up ones, where it has some of this model. `scratch`: a folder with room for weights in float32. Raises
    InputError when an explicitly wanted run has no inputs, and when the model cannot be run.
    """
    name, inputs = source.name, list(model.graph.inputs)
    feeds = recorded_inputs(recorded, name, inputs)
    kind = "recorded" if feeds else "made-up"
    reason = _why_not(model, wanted, bool(feeds))
    if reason is None and not feeds:
        try:
            feeds = [random_inputs(name, inputs, source.config(), CALIBRATED)]
        except InputError as error:
            if wanted:
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
            highest = max(ranges.get(str(output.name), 0.0), ranges.get(f"{output.name}{INSIDE}", 0.0))
            if limit < highest < MASK:
                result.nodes |= {node, *(user for user, _ in output.uses())}
                site = {"op": node.op_type, "value": output.name, "max_abs": highest}
                result.sites.append({**site, "metadata": dict(node.metadata_props)})
    result.note = f"{len(result.sites)} of {len(ranges)} values exceed {limit:.0f} on {len(feeds)} {kind} inputs"
    return result


def measure(model: ir.Model, feeds: Sequence[Arrays], scratch: Path) -> dict[str, float]:
    """Largest magnitude, over `feeds`, of every float32 value that a node of `model` makes and another reads, by name.

    Of what an operator's kernels may round on the way too, by its output's name and `INSIDE`. NaN counts as infinite.
    Writes a copy of the model below `scratch` and removes it again, with its weights where they are above `SIZE_LIMIT`:
    links to the source's would be seen by others who read it meanwhile. Raises CannotRun.
    """
    common.NameFixPass()(model)
    copy = model.clone()
    names = _add_ranges(copy)
    function_bodies.attach(copy, [node for node in copy.graph if node.domain == DOMAIN])
    ranges = dict.fromkeys(names, 0.0)
    with tempfile.TemporaryDirectory(prefix=".calibration-", dir=scratch) as work:
        path = Path(work) / "component" / folder.MODEL
        path.parent.mkdir()
        weights = _in_memory(copy, path.with_name(folder.DATA)) if _bytes(copy) <= SIZE_LIMIT else {}
        ir.save(copy, path, external_data=None if weights else folder.DATA)
        for outputs in _run(path, feeds, weights):
            for name in names:
                highest = float(outputs[f"{name}.range"])
                ranges[name] = max(ranges[name], math.inf if np.isnan(highest) else highest)
    return ranges


def _in_memory(model: ir.Model, data: Path) -> Arrays:
    """The numbers of large float32 weights, by name; in `model` they lie in the file `data`, a hole of their size."""
    numbers: Arrays = {}
    size = 0
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        assert tensor is not None
        array = tensor_values(tensor)
        if tensor.dtype == ir.DataType.FLOAT and tensor.nbytes > LARGE:
            shape, numbers[name] = ir.Shape(array.shape), np.ascontiguousarray(array)
            value.const_value = ir.ExternalTensor(
                data.name, size, array.nbytes, tensor.dtype, shape=shape, name=name, base_dir=str(data.parent)
            )
            size += array.nbytes
        elif isinstance(tensor, ir.ExternalTensor):
            value.const_value = ir.Tensor(array, dtype=tensor.dtype, name=name)
    with data.open("wb") as file:
        file.truncate(size)
    return numbers


def _run(path: Path, feeds: Sequence[Arrays], weights: Arrays) -> Iterator[Arrays]:
    from sd_ort.runtime.device_memory import host_value
    from sd_ort.runtime.session import Model, create_session

    held = {name: host_value(array) for name, array in weights.items()}
    try:
        run = Model(create_session(path, "cpu", library=False, once=True, held=held))
        for feed in feeds:
            yield run(**feed)
    except SdOrtError as error:
        raise CannotRun(str(error)) from error


def _add_ranges(model: ir.Model) -> list[str]:
    """Give the graph one scalar output, max |x|, for every float32 value, in place of its own; returns their names."""
    names = []
    graph = model.graph
    for node in [node for node in graph if node.domain == DOMAIN]:
        if (inside := BY_NAME[node.op_type].internal_node) is not None:
            made = inside(node)
            made.outputs[0].name, made.outputs[0].type = f"{node.outputs[0].name}{INSIDE}", node.outputs[0].type
            graph.append(made)
    values = [v for node in graph for i, v in enumerate(node.outputs) if not is_float32_output(node, i)]
    wanted = [v for v in values if v.uses() or v.is_graph_output() or str(v.name).endswith(INSIDE)]
    used = [v for v in wanted if v.dtype == ir.DataType.FLOAT]
    graph.outputs.clear()
    for value in used:
        magnitude = ir.node("Abs", [value])
        highest = ir.node("ReduceMax", [magnitude.outputs[0]], {"keepdims": 0})
        magnitude.outputs[0].name, highest.outputs[0].name = f"{value.name}.magnitude", f"{value.name}.range"
        highest.outputs[0].dtype, highest.outputs[0].shape = ir.DataType.FLOAT, ir.Shape([])
        graph.extend([magnitude, highest])
        graph.outputs.append(highest.outputs[0])
        names.append(str(value.name))
    return names


def _why_not(model: ir.Model, wanted: bool | None, recorded: bool) -> str | None:
    if wanted is False:
        return "switched off"
    if importlib.util.find_spec("onnxruntime") is None:
        return "onnxruntime is not installed"
    size = _bytes(model)
    if wanted is None and not recorded and size > SIZE_LIMIT:
        return f"its {size / 1e9:.1f} GB are above {SIZE_LIMIT / 1e9:.1f} GB; --calibrate runs it all the same"
    return None


def _bytes(model: ir.Model) -> int:
    """Of a model's weights."""
    tensors = [value.const_value for value in model.graph.initializers.values()]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
