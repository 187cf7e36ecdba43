"""Verify: every optimized component, or ONNX file, against its source, on the same inputs at several shapes.

One session is in memory at a time: the source runs first and leaves its outputs behind. Where the CPU stands in for a
provider with other kernels, or for half precision, it runs a copy of the component (see
`graphs.cpu_emulation`), and the result says so.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from sd_ort.checkpoints.configs import model_config
from sd_ort.checkpoints.recorded_inputs import check_recorded, load_recorded_inputs
from sd_ort.checkpoints.synthetic_inputs import SIZES, Arrays, random_inputs
from sd_ort.core import pipeline_folder
from sd_ort.core.errors import InputError, SdOrtError, VerificationError
from sd_ort.core.pipeline_folder import bare_model, model_name
from sd_ort.graphs import hoist
from sd_ort.graphs.cpu_emulation import cpu_equivalent, half_type, loads_on_cpu
from sd_ort.graphs.load import load
from sd_ort.runtime.session import Model, create_session

KNOWN = (*pipeline_folder.COMPONENTS, "controlnet")
# As the VAE encoders of diffusers' old conversion script do.
DRAWING = ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial")
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
    """Compare two pipeline folders, or two ONNX files; returns {"rows": [...], "notes": [...], "passed": bool}.

    A row is one output of one run: component, output, run (its sizes), shape, relative_error = |got - want| / |want|
    (L2 norms), nmse (its square), max_abs, finite, source_finite, tolerance, passed. `tolerance` bounds relative_error
    and defaults to `TOLERANCE` of the optimized component's type. `inputs`: runs recorded in an .npz, which take the
    place of made-up inputs at `sizes` for the components that it has. `provider` runs the optimized folder; the source
    runs on the CPU, fed with the same numbers. `library`: False lets fused operators run as their function bodies even
    where a custom-op library is installed. `report` gets every row when it is known.

    Raises InputError for what are not two forms of one model and for inputs that the source does not take,
    ProviderError for what the provider cannot run. A failure to agree is not an exception here: see `check`. A
    component of another kind than ours (a safety checker), whose inputs nobody can make up, is compared on recorded
    inputs alone; a note says so.
    """
    pairs = _pairs(source, optimized, components)
    alone = bare_model(source) is not None
    if inputs and not alone:
        check_recorded(inputs, [pair.name for pair in pairs])
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for name, path, other in pairs:
        source_graph = load(path).graph
        graph_inputs = list(source_graph.inputs)
        runs = load_recorded_inputs(inputs, name, graph_inputs, required=alone)
        feeds = [(f"recorded {index}", run) for index, run in enumerate(runs)]
        if not feeds and not alone and name not in KNOWN:
            notes.append(f"{name}: NOT compared, since its inputs are not known: record some for --inputs.")
            continue
        if drawing := next((node.op_type for node in source_graph if node.op_type in DRAWING), None):
            notes.append(f"{name}: NOT compared, since its {drawing} draws other numbers at every run.")
            continue
        feeds = feeds or _made_up(name, graph_inputs, model_config(path), sizes, seed)
        with _whole(other, name, notes) as whole, _runnable(whole, name, provider, library, notes) as runnable:
            model = load(whole)
            arrays = _in_half(model, [feed for _, feed in feeds])
            try:
                expected = _run(path, arrays)
            except SdOrtError as error:
                raise InputError(
                    f"{source} itself cannot be run: {error} Record inputs that fit for --inputs."
                ) from error
            actual = _run(runnable, arrays, provider, library)
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
    if blind := [row for row in failed if not row["source_finite"]]:
        raise VerificationError(
            f"{blind[0]['component']} cannot be judged: the source itself makes NaN or infinite numbers in "
            f"{blind[0]['output']} ({len(blind)} of {len(result['rows'])} outputs): give inputs that it is made for "
            "with --inputs."
        )
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
    """Errors of `got` against `want`; a wrong shape or a NaN in either makes them infinite."""
    finite, source_finite = bool(np.isfinite(got).all()), bool(np.isfinite(want).all())
    entry: dict[str, Any] = {"shape": list(got.shape), "finite": finite, "source_finite": source_finite}
    if got.shape != want.shape or not finite or not source_finite:
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


class _Pair(NamedTuple):
    """What a model is called, its source and what was made of it: two ONNX files."""

    name: str
    source: Path
    optimized: Path


def _pairs(source: Path, optimized: Path, wanted: Sequence[str] | None) -> list[_Pair]:
    """Every component that both folders have, checked; or the one pair of two ONNX files."""
    alone = [bare_model(path) for path in (source, optimized)]
    if all(alone) and not wanted:
        return [_Pair(model_name(alone[0]), alone[0], alone[1])]  # type: ignore[arg-type]
    if any(alone):
        raise InputError(f"{source} and {optimized} cannot be compared: give two pipeline folders, or two .onnx files.")
    there = pipeline_folder.components(source)
    names = [name for name in pipeline_folder.components(optimized) if name in there]
    missing = [name for name in wanted or () if name not in names]
    if missing or not names:
        has = f"{', '.join(names)} are in both" if names else "they have no component in common"
        raise InputError(
            f"{source} and {optimized} cannot be compared{': ' + ', '.join(missing) if missing else ''}; {has}."
        )
    chosen = [name for name in names if not wanted or name in wanted]
    return [
        _Pair(name, pipeline_folder.check_component(source, name), pipeline_folder.check_component(optimized, name))
        for name in chosen
    ]


def _made_up(
    name: str, inputs: Sequence[ir.Value], config: dict[str, Any], sizes: Sequence[dict[str, int]], seed: int
) -> list[tuple[str, Arrays]]:
    """(sizes in words, arrays) of each run; sizes at which all shapes are those of an earlier run are left out."""
    runs: dict[Any, tuple[str, Arrays]] = {}
    for size in sizes:
        arrays = random_inputs(name, inputs, config, size, seed)
        said = " ".join(f"{key} {number}" for key, number in size.items())
        runs.setdefault(tuple(array.shape for array in arrays.values()), (said, arrays))
    return list(runs.values())


def _in_half(model: ir.Model, feeds: Sequence[Arrays]) -> list[Arrays]:
    """The feeds with numbers that the inputs of `model` can hold: both sides get the same."""
    half = {str(v.name) for v in model.graph.inputs if v.dtype == ir.DataType.FLOAT16}
    return [
        {key: array.astype(np.float16).astype(np.float32) if key in half else array for key, array in feed.items()}
        for feed in feeds
    ]


def _run(path: Path, feeds: Sequence[Arrays], provider: str = "cpu", library: bool = False) -> list[Arrays]:
    """Outputs of every run; the session is gone afterwards. A hoisted graph's timestep has an axis where its source's
    may have none."""
    model = Model(create_session(path, provider, library=library))
    one = {name for name, declared in model.inputs.items() if len(declared.shape) == 1}
    return [model(**{name: np.atleast_1d(a) if name in one else a for name, a in feed.items()}) for feed in feeds]


@contextmanager
def _whole(path: Path, name: str, notes: list[str]) -> Iterator[Path]:
    """The model at `path`; for a hoisted UNet, its three graphs as the one they were, until the context is left."""
    optimized = path.parent.parent
    if name != hoist.PARTS["step"] or not hoist.is_hoisted(optimized):
        yield path
        return
    for part in hoist.PARTS.values():
        pipeline_folder.check_component(optimized, part)
    notes.append(f"{name}: {', '.join(hoist.PARTS.values())} were joined to the one graph they came from.")
    with tempfile.TemporaryDirectory(prefix=".joined-", dir=optimized) as scratch:
        joined = Path(scratch) / name / pipeline_folder.MODEL
        joined.parent.mkdir()
        ir.save(hoist.join(optimized), joined, external_data=pipeline_folder.DATA)
        yield joined


@contextmanager
def _runnable(path: Path, name: str, provider: str, library: bool, notes: list[str]) -> Iterator[Path]:
    """The model at `path`, or its copy for the CPU; the original must load all the same where the CPU has kernels."""
    if provider != "cpu":
        yield path
        return
    with cpu_equivalent(path) as (copy, done):
        notes += [f"{name}: {note}." for note in done]
        if copy != path and loads_on_cpu(load(path)):
            create_session(path, library=library)
        yield copy
