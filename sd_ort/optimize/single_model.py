"""Optimize one ONNX file by itself, of any model and exporter: no pipeline folder, no manifest."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import onnx_ir as ir

from sd_ort.checkpoints.recorded_inputs import recorded_inputs
from sd_ort.core.errors import OutputError
from sd_ort.core.files import scratch_folder
from sd_ort.core.interrupts import in_threads
from sd_ort.core.paths import output_path
from sd_ort.core.pipeline_folder import model_name
from sd_ort.graphs.load import load
from sd_ort.optimize.optimizer import Report, chosen_target, optimize_component
from sd_ort.optimize.targets import TARGETS
from sd_ort.runtime.session import blaming, check_opens


def optimize_file(
    source: Path,
    output: Path,
    *,
    target: str | None = None,
    dtype: str = "float32",
    calibrate: bool | None = None,
    inputs: Path | None = None,
    report: Report = lambda line: None,
) -> dict[str, Any]:
    """Fuse the ONNX file `source` into the file `output`; returns what `optimize_component` does. Options as there.

    Weights lie in `output` where they lay in `source`, else beside it in OUTPUT.data. `inputs`: an .npz of arrays
    called as the graph's inputs, for several runs input/0, input/1. Raises InputError for a source or recorded runs
    that cannot be used, OutputError when a file of the output exists or cannot be written; then nothing is left behind.
    """
    target, why = chosen_target(target, dtype, bool(calibrate or inputs))
    if output.suffix != ".onnx" or output.is_dir():
        raise OutputError(f"{source} is one ONNX file, so OUT must be one too: give a name that ends in .onnx.")
    output = output_path(output, source)
    data = output.with_name(f"{output.name}.data")
    for path in (output, data):
        if path.exists():
            raise OutputError(f"{path} exists: remove it or choose another name.")
    model = load(source)
    recorded_inputs(inputs, model_name(source), list(model.graph.inputs), required=True)
    if why:
        report(why)
    entry: dict[str, Any] = {}
    with scratch_folder(output.parent, output.name) as work:
        made = work / "model" / output.name

        def make(name: str, stopped: threading.Event) -> None:
            options: dict[str, Any] = {"calibrate": calibrate, "inputs": inputs, "embed": not _has_files(model)}
            with blaming(source):
                entry.update(optimize_component(source, made, TARGETS[target], dtype, stopped=stopped, **options))
            check_opens(made)

        in_threads(make, [model_name(source)], at_once=1)
        try:
            if made.with_name(data.name).exists():
                made.with_name(data.name).rename(data)
            made.rename(output)
        except BaseException:
            data.unlink(missing_ok=True)
            raise
    return entry


def _has_files(model: ir.Model) -> bool:
    """Whether weights of a model lie in files of their own."""
    values = [value.const_value for graph in model.graphs() for value in graph.initializers.values()]
    return any(isinstance(tensor, ir.ExternalTensor) for tensor in values)
