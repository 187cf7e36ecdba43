"""Verify: every optimized component against its source, on the same inputs at several shapes.

One session is in memory at a time: the source runs first and leaves its outputs behind. Where the CPU stands in for a
provider with other kernels, or for half precision, it runs a copy of the component (see
`graphs.cpu_emulation`), and the result says so.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from sd_ort.core import folder
from sd_ort.core.errors import InputError, VerificationError
from sd_ort.family.configs import component_config
from sd_ort.family.inputs import SIZES, Arrays, random_inputs, recorded_inputs
from sd_ort.graphs import hoist
from sd_ort.graphs.cpu_emulation import emulated, half_type, loads_on_cpu
from sd_ort.graphs.load import load
from sd_ort.runtime.session import Model, create_session

KNOWN = (*folder.COMPONENTS, "controlnet")
# Largest relative L2 error by the type of the optimized component. Fusing reorders sums of float32 (measured: up to
# 4e-6); a float16 has 11 bits of mantissa, a bfloat16 8.
TOLERANCE = {None: 1e-5, ir.DataType.FLOAT16: 3e-3, ir.DataType.BFLOAT16: 2.4e-2}


def verify(
    source: Path,
    optimized: Path,
    *,
    tolerance: float | None = None,
    components: Sequence[str] | None = None,
    inputs: Path | None = None,
    provider: str = "cpu",
    library: bool = True,
    sizes: Sequence[dict[str, int]] = SIZES,
    seed: int = 0,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> dict[str, Any]:
    """Compare the components of two pipeline folders; returns {"rows": [...], "notes": [...], "passed": bool}.

    A row is one output of one run: component, output, run (its sizes), shape, relative_error = |got - want| / |want|
    (L2 norms), nmse (its square), max_abs, finite, tolerance, passed. `tolerance` bounds relative_error and defaults
    to `TOLERANCE` of the optimized component's type. `inputs`: runs recorded in an .npz, in addition to made-up inputs
    at `sizes`. `provider` runs the optimized folder; the source runs on the CPU, fed with the same numbers. `library`:
    False lets fused operators run as their function bodies even where a custom-op library is installed. `report` gets
    every row when it is known.

    Raises InputError for folders that are not two forms of one pipeline, ProviderError for what the provider cannot
    run. A failure to agree is not an exception here: see `check`. A component of another kind than ours (a safety
    checker), whose inputs nobody can make up, is compared on recorded inputs alone; a note says so.
    """
    names = _common(source, optimized, components)
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for name in names:
        if name not in KNOWN and not (inputs and recorded_inputs(inputs, name)):
            notes.append(f"{name}: NOT compared, since its inputs are not known: record some for --inputs.")
            continue
        with _whole(optimized, name, notes) as path, _runnable(path, provider, library, notes) as runnable:
            model = load(path)
            feeds = _feeds(source, name, model, inputs, sizes, seed)
            expected = _run(folder.check_component(source, name), [feed for _, feed in feeds])
            actual = _run(runnable, [feed for _, feed in feeds], provider, library)
        limit = TOLERANCE[half_type(model)] if tolerance is None else tolerance
        for (run, _), want, got in zip(feeds, expected, actual, strict=True):
            if want.keys() != got.keys():
                raise InputError(f"{name} has other outputs than its source: optimize {source} again.")
            for output in want:
                row = {"component": name, "output": output, "run": run} | _judged(got[output], want[output], limit)
                rows.append(row)
                report(row)
    if not rows:
        raise InputError("nothing was compared: " + " ".join(notes))
    return {"rows": rows, "notes": notes, "passed": all(row["passed"] for row in rows)}


def check(result: dict[str, Any]) -> None:
    """Raise VerificationError that names the worst component unless all rows of a result of `verify` passed."""
    failed = [row for row in result["rows"] if not row["passed"]]
    if not failed:
        return
    worst = max(failed, key=lambda row: row["relative_error"])
    what = f"a relative error of {worst['relative_error']:.1e}" if worst["finite"] else "NaN or infinite numbers"
    raise VerificationError(
        f"{worst['component']} differs from its source: {worst['output']} has {what}, allowed is "
        f"{worst['tolerance']:.1e} ({len(failed)} of {len(result['rows'])} outputs fail)."
    )


def _judged(got: np.ndarray, want: np.ndarray, limit: float) -> dict[str, Any]:
    errors = compare(got, want)
    return {"tolerance": limit, **errors, "passed": bool(errors["finite"] and errors["relative_error"] <= limit)}


def compare(got: np.ndarray, want: np.ndarray) -> dict[str, Any]:
    """Errors of `got` against `want`; a wrong shape or a NaN makes them infinite."""
    entry: dict[str, Any] = {"shape": list(got.shape), "finite": bool(np.isfinite(got).all())}
    if got.shape != want.shape or not entry["finite"] or not np.isfinite(want).all():
        return entry | {"finite": False, "relative_error": float("inf"), "nmse": float("inf"), "max_abs": float("inf")}
    exact = want.astype(np.float64)
    difference = got.astype(np.float64) - exact
    norm = float(np.linalg.norm(exact))
    relative = float(np.linalg.norm(difference)) / norm if norm else float(np.any(difference)) * float("inf")
    return entry | {
        "relative_error": relative,
        "nmse": relative**2,
        "max_abs": float(np.abs(difference).max(initial=0)),
    }


def _common(source: Path, optimized: Path, wanted: Sequence[str] | None) -> list[str]:
    there = folder.components(source)
    names = [name for name in folder.components(optimized) if name in there]
    missing = [name for name in wanted or () if name not in names]
    if missing or not names:
        has = f"{', '.join(names)} are in both" if names else "they have no component in common"
        raise InputError(
            f"{source} and {optimized} cannot be compared{': ' + ', '.join(missing) if missing else ''}; {has}."
        )
    return [name for name in names if not wanted or name in wanted]


def _feeds(
    source: Path, name: str, model: ir.Model, recorded: Path | None, sizes: Sequence[dict[str, int]], seed: int
) -> list[tuple[str, Arrays]]:
    """(description, arrays) of each run, with numbers that the optimized inputs can hold: both get the same."""
    config = component_config(source, name)
    graph_inputs = list(load(source / name / folder.MODEL).graph.inputs)
    runs = []
    for size in sizes if name in KNOWN else ():
        arrays = random_inputs(name, graph_inputs, config, size, seed)
        runs.append((" ".join(f"{key} {number}" for key, number in size.items()), arrays))
    if recorded is not None:
        runs += [(f"recorded {index}", arrays) for index, arrays in enumerate(recorded_inputs(recorded, name))]
    half = {str(v.name) for v in model.graph.inputs if v.dtype == ir.DataType.FLOAT16}
    return [
        (
            run,
            {
                key: array.astype(np.float16).astype(np.float32) if key in half else array
                for key, array in arrays.items()
            },
        )
        for run, arrays in runs
    ]


def _run(path: Path, feeds: Sequence[Arrays], provider: str = "cpu", library: bool = False) -> list[Arrays]:
    """Outputs of every run; the session is gone afterwards."""
    model = Model(create_session(path, provider, library=library))
    return [model(**feed) for feed in feeds]


@contextmanager
def _whole(optimized: Path, name: str, notes: list[str]) -> Iterator[Path]:
    """The component's model; for a hoisted UNet, its three graphs as the one they were, until the context is left."""
    path = folder.check_component(optimized, name)
    if name != hoist.PARTS["step"] or not hoist.is_hoisted(optimized):
        yield path
        return
    for part in hoist.PARTS.values():
        folder.check_component(optimized, part)
    notes.append(f"{name}: {', '.join(hoist.PARTS.values())} were joined to the one graph they came from.")
    with tempfile.TemporaryDirectory(prefix=".joined-", dir=optimized) as scratch:
        joined = Path(scratch) / name / folder.MODEL
        joined.parent.mkdir()
        ir.save(hoist.join(optimized), joined, external_data=folder.DATA)
        yield joined


@contextmanager
def _runnable(path: Path, provider: str, library: bool, notes: list[str]) -> Iterator[Path]:
    """The model at `path`, or its copy for the CPU; the original must load all the same where the CPU has kernels."""
    if provider != "cpu":
        yield path
        return
    with emulated(path) as (copy, done):
        notes += [f"{path.parent.name}: {note}." for note in done]
        if copy != path and loads_on_cpu(load(path)):
            create_session(path, library=library)
        yield copy
