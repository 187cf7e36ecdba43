"""Numerical comparison of optimized components, or of an ONNX file, with their sources on the same inputs.

The source runs first, so that one session is in memory at a time. If the CPU has no kernels for a component, or would
not round to its half precision, the CPU runs a CPU-equivalent copy (`graphs.cpu_emulation`); a note says so.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from sd_ort.checkpoints.configs import model_config
from sd_ort.checkpoints.recorded_inputs import check_recorded, load_recorded_inputs
from sd_ort.checkpoints.synthetic_inputs import SIZES, Arrays, random_inputs
from sd_ort.core import pipeline_folder
from sd_ort.core.errors import InputError, SdOrtError, VerificationError
from sd_ort.core.metrics import array_errors
from sd_ort.core.pipeline_folder import model_name, standalone_model
from sd_ort.graphs import hoist
from sd_ort.graphs.cpu_emulation import cpu_equivalent, half_type, loads_on_cpu
from sd_ort.graphs.load import load
from sd_ort.runtime.session import Model, create_session

# VAE encoders of diffusers' old conversion script have such nodes.
RANDOM_OPS = ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial")
# Maximum relative L2 error by dtype of the optimized component. Fusing reorders float32 sums (measured: up to 4e-6); a
# float16 has 11 bits of mantissa, a bfloat16 8.
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
    on_row: Callable[[dict[str, Any]], None] = lambda row: None,
) -> dict[str, Any]:
    """Compare two pipeline folders, or two ONNX files; return {"rows": [...], "notes": [...], "passed": bool}.

    A row is one output of one run: component, output, run (its sizes), shape, relative_error = |actual - expected| /
    |expected| (L2 norms), nmse (its square), max_abs, finite, source_finite, tolerance, passed. Rows that fail raise no
    exception, see `check`. Components of unknown types, such as a safety checker, are compared on recorded inputs only.

    Args:
        tolerance: maximum of relative_error; default: `TOLERANCE` of the optimized component's dtype.
        inputs: .npz of recorded runs, which replace the synthetic inputs at `sizes` for the components that it has.
        provider: runs `optimized`; the source runs on the CPU with the same inputs.
        library: if False, fused operators run as function bodies even if an op library is installed.
        on_row: called with each row.

    Raises:
        InputError: for models that do not correspond, and inputs that the source rejects.
        ProviderError: if the provider cannot run a component.
    """
    paths = _paths(source, optimized, components)
    single_file = standalone_model(source) is not None
    if inputs and not single_file:
        check_recorded(inputs, list(paths))
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for name, (path, optimized_path) in paths.items():
        graph = load(path).graph
        runs = load_recorded_inputs(inputs, name, list(graph.inputs), required=single_file)
        feeds = {f"recorded {index}": run for index, run in enumerate(runs)}
        if not feeds and not single_file and name not in pipeline_folder.COMPONENTS:
            notes.append(f"{name}: NOT compared, since its inputs are not known: record some for --inputs.")
            continue
        if random_op := next((node.op_type for node in graph if node.op_type in RANDOM_OPS), None):
            notes.append(f"{name}: NOT compared, since its {random_op} draws other numbers at every run.")
            continue
        feeds = feeds or _synthetic_runs(name, list(graph.inputs), model_config(path), sizes, seed)
        with (
            _joined_model(optimized_path, name, notes) as joined,
            _cpu_model(joined, name, provider, library, notes) as runnable,
        ):
            model = load(joined)
            arrays = _rounded_feeds(model, list(feeds.values()))
            try:
                expected = _run(path, arrays)
            except SdOrtError as error:
                raise InputError(
                    f"{source} itself cannot be run: {error} Record inputs that fit for --inputs."
                ) from error
            actual = _run(runnable, arrays, provider, library)
        limit = TOLERANCE[half_type(model)] if tolerance is None else tolerance
        for run, want, got in zip(feeds, expected, actual, strict=True):
            if want.keys() != got.keys():
                raise InputError(f"{name} has other outputs than its source: optimize {source} again.")
            for output in want:
                errors = array_errors(got[output], want[output])
                passed = errors["finite"] and errors["relative_error"] <= limit
                identity = {"component": name, "output": output, "run": run, "tolerance": limit}
                rows.append({**identity, **errors, "passed": passed})
                on_row(rows[-1])
    if not rows:
        raise InputError("nothing was compared: " + " ".join(notes))
    return {"rows": rows, "notes": notes, "passed": all(row["passed"] for row in rows)}


def check(result: dict[str, Any]) -> None:
    """Raise VerificationError, which names the worst component, unless all rows of a result of `verify` passed."""
    failed = [row for row in result["rows"] if not row["passed"]]
    if not failed:
        return
    if invalid := [row for row in failed if not row["source_finite"]]:
        raise VerificationError(
            f"{invalid[0]['component']} cannot be judged: the source itself makes NaN or infinite numbers in "
            f"{invalid[0]['output']} ({len(invalid)} of {len(result['rows'])} outputs): give inputs that it is made "
            "for with --inputs."
        )
    worst = max(failed, key=lambda row: row["relative_error"])
    error = f"a relative error of {worst['relative_error']:.1e}" if worst["finite"] else "NaN or infinite numbers"
    raise VerificationError(
        f"{worst['component']} differs from its source: {worst['output']} has {error}, allowed is "
        f"{worst['tolerance']:.1e} ({len(failed)} of {len(result['rows'])} outputs fail)."
    )


def _paths(source: Path, optimized: Path, components: Sequence[str] | None) -> dict[str, tuple[Path, Path]]:
    """Return the source and optimized ONNX file of each component of both folders, or of two ONNX files."""
    files = [model for path in (source, optimized) if (model := standalone_model(path)) is not None]
    if len(files) == 2 and not components:
        return {model_name(files[0]): (files[0], files[1])}
    if files:
        raise InputError(f"{source} and {optimized} cannot be compared: give two pipeline folders, or two .onnx files.")
    in_source = pipeline_folder.components(source)
    names = [name for name in pipeline_folder.components(optimized) if name in in_source]
    missing = [name for name in components or () if name not in names]
    if missing or not names:
        common = f"{', '.join(names)} are in both" if names else "they have no component in common"
        raise InputError(
            f"{source} and {optimized} cannot be compared{': ' + ', '.join(missing) if missing else ''}; {common}."
        )
    return {
        name: (pipeline_folder.check_component(source, name), pipeline_folder.check_component(optimized, name))
        for name in names
        if not components or name in components
    }


def _synthetic_runs(
    name: str, inputs: Sequence[ir.Value], config: dict[str, Any], sizes: Sequence[dict[str, int]], seed: int
) -> dict[str, Arrays]:
    """Return the arrays of each run by the label of its sizes, without runs whose shapes an earlier run has."""
    runs: dict[Any, tuple[str, Arrays]] = {}
    for size in sizes:
        arrays = random_inputs(name, inputs, config, size, seed)
        label = " ".join(f"{axis} {count}" for axis, count in size.items())
        runs.setdefault(tuple(array.shape for array in arrays.values()), (label, arrays))
    return dict(runs.values())


def _rounded_feeds(model: ir.Model, feeds: Sequence[Arrays]) -> list[Arrays]:
    """Round the arrays of float16 inputs of `model` to float16, as float32: both models get the same values."""
    half = {str(v.name) for v in model.graph.inputs if v.dtype == ir.DataType.FLOAT16}
    return [
        {name: array.astype(np.float16).astype(np.float32) if name in half else array for name, array in feed.items()}
        for feed in feeds
    ]


def _run(path: Path, feeds: Sequence[Arrays], provider: str = "cpu", library: bool = False) -> list[Arrays]:
    """Return the outputs of each run. A scalar timestep gets an axis for graphs that have one there (hoisted UNets)."""
    model = Model(create_session(path, provider, library=library))
    one_axis = {name for name, declared in model.inputs.items() if len(declared.shape) == 1}
    return [model(**{name: np.atleast_1d(a) if name in one_axis else a for name, a in feed.items()}) for feed in feeds]


@contextmanager
def _joined_model(path: Path, name: str, notes: list[str]) -> Iterator[Path]:
    """Yield `path`, or for a hoisted UNet a temporary model that joins its three graphs."""
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
def _cpu_model(path: Path, name: str, provider: str, library: bool, notes: list[str]) -> Iterator[Path]:
    """Yield `path`, or its CPU-equivalent copy for provider cpu; if the CPU has all kernels, the original must load."""
    if provider != "cpu":
        yield path
        return
    with cpu_equivalent(path) as (copy, modifications):
        notes += [f"{name}: {note}." for note in modifications]
        if copy != path and loads_on_cpu(load(path)):
            create_session(path, library=library)
        yield copy
