"""Ranges of activations for static quantization: percentiles of magnitudes over recorded runs of a float32 graph.

Each activation gives its largest magnitude and a sample of its elements. The step between sampled elements is 1 modulo
30: it has no common factor with the channels of these models, so that all channels are sampled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from fusion_passes.graph_edits import new_initializer
from sd_ort.checkpoints.synthetic_inputs import Arrays
from sd_ort.core.errors import InputError
from sd_ort.optimize.calibration import run_model

SAMPLE = 4096  # elements of an activation in a run, about
# Percentile of the magnitudes that is the largest element. Float8 has exponents for outliers; int8 trades them for
# finer steps (results/eight_bits.md).
PERCENTILES = {"float8": 100.0, "int8": 99.99}


def measure_ranges(
    model: ir.Model, names: Sequence[str], feeds: Sequence[Arrays], scratch: Path, percentile: float
) -> dict[str, float]:
    """Return the percentile of the magnitudes of each value over the runs `feeds`; 100 is the largest one.

    Args:
        model: A graph in float32, of which a copy is written below `scratch` and removed. Its names must be unique
            (`NameFixPass`).
        names: Inputs of the graph or values that its nodes compute.

    Raises:
        CannotRun: ONNX Runtime cannot run the graph.
        InputError: A value is not finite.
    """
    copy = model.clone()
    _replace_outputs(copy, names)
    common.RemoveUnusedNodesPass()(copy)
    largest = dict.fromkeys(names, 0.0)
    samples: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for run, outputs in enumerate(run_model(copy, feeds, scratch)):
        for name in names:
            highest = float(outputs[f"{name}.range"])
            if not math.isfinite(highest):
                raise InputError(
                    f"calibration run {run} computes {highest:g} in {name}: leave its prompt out, or repair the "
                    "checkpoint."
                )
            largest[name] = max(largest[name], highest)
            samples[name].append(outputs[f"{name}.sample"])
    if percentile >= 100:
        return largest
    return {name: _percentile(samples[name], percentile) or largest[name] for name in names}


def _percentile(samples: Sequence[np.ndarray], percentile: float) -> float:
    return float(np.percentile(np.concatenate(samples), percentile))


def _replace_outputs(model: ir.Model, names: Sequence[str]) -> None:
    """Replace the graph's outputs by the largest magnitude and a sample of the magnitudes of each value."""
    graph = model.graph
    values = {str(value.name): value for value in graph.inputs}
    values |= {str(value.name): value for node in graph for value in node.outputs}
    constants = {
        name: new_initializer(graph, f"calibration.{name}", [number])
        for name, number in {"flat": -1, "zero": 0, "end": np.iinfo(np.int64).max, "size": SAMPLE, "thirty": 30,
                             "one": 1}.items()
    }  # fmt: skip
    graph.outputs.clear()

    def add(op_type: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        node = ir.node(op_type, inputs, attributes)
        node.outputs[0].name = f"calibration.{len(graph)}"
        graph.append(node)
        return node.outputs[0]

    for name in names:
        magnitude = add("Abs", values[name])
        highest = add("ReduceMax", magnitude, keepdims=0)
        flat = add("Reshape", magnitude, constants["flat"])
        share = add("Div", add("Shape", flat), constants["size"])
        rounded = add("Mul", add("Div", share, constants["thirty"]), constants["thirty"])
        step = add("Add", rounded, constants["one"])
        sample = add("Slice", flat, constants["zero"], constants["end"], constants["zero"], step)
        for value, suffix, shape in ((highest, "range", []), (sample, "sample", [None])):
            value.name, value.dtype, value.shape = f"{name}.{suffix}", ir.DataType.FLOAT, ir.Shape(shape)
            graph.outputs.append(value)
