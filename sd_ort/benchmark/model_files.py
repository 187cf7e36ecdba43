"""Times of ONNX files of any model, called in turn on the same inputs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from sd_ort.checkpoints.configs import model_config
from sd_ort.checkpoints.recorded_inputs import load_recorded_inputs
from sd_ort.checkpoints.synthetic_inputs import SIZES, random_inputs
from sd_ort.core.errors import InputError
from sd_ort.core.metrics import relative_l2_error
from sd_ort.core.pipeline_folder import model_name
from sd_ort.graphs.load import load
from sd_ort.runtime.session import OrtModel, SessionOptions, create_session


def compare_files(
    paths: Sequence[Path], provider: str, inputs: Path | None, *, threads: int | None, warmup: int, runs: int
) -> list[dict[str, Any]]:
    """Return a row per file: file, ms (median of `runs` calls), ratio to the first file and error against its outputs.

    The files are called in turn, so that a busy machine slows all of them alike; a ratio is the median of the ratios
    within a turn. `inputs`: .npz of recorded inputs, whose first run is used; None for synthetic ones.

    Raises:
        InputError: The files differ in their inputs or outputs, or the inputs do not fit.
    """
    declared, name = list(load(paths[0]).graph.inputs), model_name(paths[0])
    recorded = load_recorded_inputs(inputs, name, declared, required=True)
    feed = recorded[0] if recorded else random_inputs(name, declared, model_config(paths[0]), SIZES[0])
    models = [OrtModel(create_session(path, provider, SessionOptions(threads=threads))) for path in paths]
    for path, model in zip(paths, models, strict=True):
        if model.inputs.keys() != models[0].inputs.keys():
            raise InputError(f"{path} has other inputs than {paths[0]}: give files of one model.")
    outputs = [model(**feed) for model in models]
    seconds: list[list[float]] = [[] for _ in models]
    for turn in range(warmup + runs):
        for model, times in zip(models, seconds, strict=True):
            started = time.perf_counter()
            model(**feed)
            if turn >= warmup:
                times.append(time.perf_counter() - started)
    rows = []
    for path, times, actual in zip(paths, seconds, outputs, strict=True):
        if actual.keys() != outputs[0].keys() or any(actual[key].shape != outputs[0][key].shape for key in actual):
            raise InputError(f"{path} has other outputs than {paths[0]}: give files of one model.")
        ratio = median(own / first for own, first in zip(times, seconds[0], strict=True))
        error = max(relative_l2_error(actual[key], outputs[0][key]) for key in actual)
        rows.append({"file": str(path), "ms": 1e3 * median(times), "ratio": ratio, "error": error})
    return rows


def to_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as text."""
    lines = [f"{'ms':>10}{'ratio':>8}{'error':>10}  file"]
    lines += [f"{row['ms']:>10.3f}{row['ratio']:>8.3f}{row['error']:>10.1e}  {row['file']}" for row in rows]
    return "\n".join(lines)
