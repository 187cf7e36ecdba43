"""Runs that the user recorded, for verification and calibration: they take the place of made-up inputs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import onnx_ir as ir

from sd_ort.core.errors import InputError, first_line

Arrays = dict[str, np.ndarray]


def load_recorded_inputs(
    path: Path | None, model: str, inputs: Sequence[ir.Value], *, required: bool = False
) -> list[Arrays]:
    """The runs in the .npz `path` for the model called `model` with the graph inputs `inputs`; [] when it has none.

    Arrays are called `model/input`, or `model/input/0`, `model/input/1` for several runs; without `model/` they are
    those of a model by itself. Raises InputError for a file that cannot be read, for a run that lacks an input, has
    one that the model does not take, or an array that does not fit, and where runs are `required` and there are none.
    """
    if path is None:
        return []
    known = {str(value.name): value for value in inputs}
    runs: dict[str, Arrays] = {}
    for name, array in _arrays(path, model, known).items():
        value, run = (name, "") if name in known or "/" not in name else name.rsplit("/", 1)
        runs.setdefault(run, {})[value] = array
    if required and not runs:
        raise InputError(f"{path} has no runs of {model}: call its arrays {', '.join(known)} (several runs: input/0).")
    for run, arrays in runs.items():
        if arrays.keys() != known.keys():
            odd = ", ".join(sorted(arrays.keys() ^ known.keys()))
            raise InputError(f"{path}: run {run or 0} of {model} and the model differ in their inputs: {odd}.")
        for name, array in arrays.items():
            _check(path, f"{model}/{name}", array, known[name])
    return [runs[run] for run in sorted(runs)]


def check_recorded(path: Path, models: Collection[str]) -> None:
    """Raise InputError unless the .npz `path` has runs of one of `models`."""
    with _open(path) as file:
        if not any(_of(name, model) for name in file.files for model in models):
            raise InputError(f"{path} has no runs of {', '.join(models)}: call its arrays component/input[/run].")


def _of(name: str, model: str) -> str | None:
    """What an array's name says behind the model's, or None for another model's array."""
    return name.removeprefix(f"{model}/") if name.startswith(f"{model}/") else None


def _open(path: Path) -> np.lib.npyio.NpzFile:
    try:
        file = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise InputError(f"{path} cannot be read ({first_line(error)}): save it with numpy.savez.") from error
    if not isinstance(file, np.lib.npyio.NpzFile):
        raise InputError(f"{path} holds one array without a name: save it with numpy.savez.")
    return file


def _arrays(path: Path, model: str, known: Iterable[str]) -> Arrays:
    """The arrays of a model, by their names without the model's."""
    with _open(path) as file:
        names = {name: _of(name, model) for name in file.files}
        own = {name: name for name in file.files if name in known or name.rpartition("/")[0] in known}
        wanted = {name: short for name, short in names.items() if short} or own
        try:
            return {short: file[name] for name, short in wanted.items()}
        except (OSError, ValueError, EOFError, BadZipFile) as error:
            raise InputError(f"{path} cannot be read ({first_line(error)}): save it with numpy.savez.") from error


def _check(path: Path, name: str, array: np.ndarray, value: ir.Value) -> None:
    sizes = None if value.shape is None else [d if isinstance(d, int) else None for d in value.shape]
    fits = sizes is None or (
        len(sizes) == array.ndim and all(size in (None, got) for size, got in zip(sizes, array.shape, strict=True))
    )
    if not fits:
        raise InputError(f"{path}: {name} has the shape {list(array.shape)}, the model takes {value.shape}.")
    is_whole = value.dtype is not None and not value.dtype.is_floating_point()
    if array.dtype.kind not in ("biu" if is_whole else "fiu"):
        raise InputError(f"{path}: {name} is of {array.dtype}, the model takes {value.dtype}.")
