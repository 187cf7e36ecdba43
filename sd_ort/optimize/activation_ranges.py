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

from fusion_passes import value_queries as values
from fusion_passes.graph_edits import new_initializer
from sd_ort.checkpoints.synthetic_inputs import Arrays
from sd_ort.core.errors import InputError
from sd_ort.optimize.calibration import append_magnitude, run_model

SAMPLE = 4096  # elements of an activation in a run, about
# Percentile of the magnitudes that is the largest element. Float8 has exponents for outliers; int8 trades them for
# finer steps (results/eight_bits.md). What a gate computes keeps its largest magnitude: its few large elements carry an
# image, and clipping those of one layer of the demo took its worst image from 26.7 to 15.8 dB.
PERCENTILES = {"float8": 100.0, "int8": 99.99}
GATES = frozenset({"BiasSplitGelu", "LinearSplitGelu", "SwiGlu"})  # and products of two values


def measure_ranges(
    model: ir.Model,
    names: Sequence[str],
    feeds: Sequence[Arrays],
    scratch: Path,
    percentile: float,
    *,
    clip_gates: bool = False,
) -> dict[str, float]:
    """Return the percentile of the magnitudes of each value over the runs `feeds`; 100 is the largest one.

    Values that one of GATES computes have the largest one, without `clip_gates`.

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
    gated = {str(node.outputs[0].name) for node in model.graph if _is_gate(node) and not clip_gates}
    if percentile < 100:
        for name in names:
            if name not in gated:
                largest[name] = float(np.percentile(np.concatenate(samples[name]), percentile)) or largest[name]
    return largest


def _is_gate(node: ir.Node) -> bool:
    """Return whether a node multiplies two values that are computed."""
    return node.op_type in GATES or (node.op_type == "Mul" and not any(map(values.is_constant, node.inputs)))


def _replace_outputs(model: ir.Model, names: Sequence[str]) -> None:
    """Replace the graph's outputs by the largest magnitude and a sample of the magnitudes of each value."""
    graph = model.graph
    named = {str(value.name): value for value in graph.inputs}
    named |= {str(value.name): value for node in graph for value in node.outputs}
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
        magnitude, highest = append_magnitude(graph, named[name])
        flat = add("Reshape", magnitude, constants["flat"])
        share = add("Div", add("Shape", flat), constants["size"])
        rounded = add("Mul", add("Div", share, constants["thirty"]), constants["thirty"])
        step = add("Add", rounded, constants["one"])
        sample = add("Slice", flat, constants["zero"], constants["end"], constants["zero"], step)
        sample.name, sample.dtype, sample.shape = f"{name}.sample", ir.DataType.FLOAT, ir.Shape([None])
        graph.outputs.extend([highest, sample])
