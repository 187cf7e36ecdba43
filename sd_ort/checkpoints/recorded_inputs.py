"""Recorded inputs of components, for verification and calibration instead of synthetic inputs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from sd_ort.core.errors import InputError
from sd_ort.core.npz_file import npz_names, read_npz

Arrays = dict[str, np.ndarray]


def load_recorded_inputs(
    path: Path | None, model: str, inputs: Sequence[ir.Value], *, required: bool = False
) -> list[Arrays]:
    """Return the runs in the .npz `path` of `model` with the graph inputs `inputs`; [] if it has none.

    Arrays are named `model/input`, or `model/input/0`, `model/input/1` for several runs; for a single model also
    without `model/`. Raises InputError for an unreadable file, missing or unknown inputs, arrays of wrong shape or
    dtype, and if there are no runs but they are `required`.
    """
    if path is None:
        return []
    by_name = {str(value.name): value for value in inputs}
    runs: dict[str, Arrays] = {}
    for name, array in _arrays(path, model, by_name).items():
        value, run = (name, "") if name in by_name or "/" not in name else name.rsplit("/", 1)
        runs.setdefault(run, {})[value] = array
    if required and not runs:
        raise InputError(
            f"{path} has no runs of {model}: call its arrays {', '.join(by_name)} (several runs: input/0)."
        )
    for run, arrays in runs.items():
        if difference := ", ".join(sorted(arrays.keys() ^ by_name.keys())):
            raise InputError(f"{path}: run {run or 0} of {model} and the model differ in their inputs: {difference}.")
        for name, array in arrays.items():
            _check(path, f"{model}/{name}", array, by_name[name])
    return [runs[run] for run in sorted(runs)]


def check_recorded(path: Path, models: Collection[str]) -> None:
    """Raise InputError unless the .npz `path` has runs of one of `models`."""
    if not any(_array_name(name, model) for name in npz_names(path) for model in models):
        raise InputError(f"{path} has no runs of {', '.join(models)}: call its arrays component/input[/run].")


def _array_name(name: str, model: str) -> str | None:
    """Return the name of an array without the model's, or None for another model's array."""
    return name.removeprefix(f"{model}/") if name.startswith(f"{model}/") else None


def _arrays(path: Path, model: str, input_names: Iterable[str]) -> Arrays:
    """Return the arrays of a model, by their names without the model's."""
    names = {name: _array_name(name, model) for name in npz_names(path)}
    own = {name: name for name in names if name in input_names or name.rpartition("/")[0] in input_names}
    selected = {name: short for name, short in names.items() if short} or own
    return {selected[name]: array for name, array in read_npz(path, selected.__contains__).items()}


def _check(path: Path, name: str, array: np.ndarray, value: ir.Value) -> None:
    sizes = None if value.shape is None else [d if isinstance(d, int) else None for d in value.shape]
    fits = sizes is None or (
        len(sizes) == array.ndim and all(size in (None, got) for size, got in zip(sizes, array.shape, strict=True))
    )
    if not fits:
        raise InputError(f"{path}: {name} has the shape {list(array.shape)}, the model takes {value.shape}.")
    is_integer = value.dtype is not None and not value.dtype.is_floating_point()
    if array.dtype.kind not in ("biu" if is_integer else "fiu"):
        raise InputError(f"{path}: {name} is of {array.dtype}, the model takes {value.dtype}.")
