"""Numerical comparison of optimized components, or of an ONNX file, with their sources on the same inputs.

Every initializer is also compared with that of the graph which is optimized from the source again, bit for bit
(`weight_verification`); outputs alone would miss a small change of one weight in half precision. The source runs first,
so that one session is in memory at a time. If the CPU has no kernels for a component, or would not round to its half
precision, the CPU runs a CPU-equivalent copy (`graphs.cpu_emulation`); a note says so.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from fusion_passes import weight_recipes
from fusion_passes.graph_edits import tensor_values
from sd_ort.checkpoints.configs import model_config
from sd_ort.checkpoints.recorded_inputs import check_recorded, load_recorded_inputs
from sd_ort.checkpoints.synthetic_inputs import SIZES, Arrays, random_inputs
from sd_ort.core import pipeline_folder
from sd_ort.core.errors import InputError, SdOrtError, VerificationError
from sd_ort.core.metrics import array_errors
from sd_ort.core.pipeline_folder import model_name, standalone_model
from sd_ort.graphs import hoist
from sd_ort.graphs.cpu_emulation import COPYING_OPS, HALVES, cpu_equivalent, half_type, loads_on_cpu
from sd_ort.graphs.load import load
from sd_ort.inspect.weight_verification import compare_with_file, component_graphs
from sd_ort.runtime.session import OrtModel, SessionOptions, create_session

# VAE encoders of diffusers' old conversion script have such nodes.
RANDOM_OPS = ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial")
STORED = "stored_elements"  # recipe of weights in 4 or 8 bits (optimize.weight_storage)
# Maximum relative L2 error of float32 arithmetic: fusing reorders sums (measured: up to 4e-6).
FLOAT32_TOLERANCE = 1e-5
NEAR_MISS = 2.0  # times the tolerance
# Allowed error in half precision, in errors that rounding the weights alone makes (65 real files: up to 1.5).
ROUNDED_WEIGHTS_FACTOR = 2.0
AMPLIFIED_LIMIT = 0.1  # what rounding may make of it at most: an output of which a tenth is wrong shows nothing
MIN_DEPTH = 256  # of the bound in half precision, 2.9e-3 in float16: shallow graphs may cancel numbers


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
        tolerance: maximum of relative_error; default: `rounding_tolerance`, or in half precision, if every weight is
            exact, `ROUNDED_WEIGHTS_FACTOR` times the error that rounding the source's weights makes, at most
            `AMPLIFIED_LIMIT`.
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
    weights: list[dict[str, Any]] = []
    notes: list[str] = []
    for name, (path, optimized_path) in paths.items():
        graph = load(path).graph
        parts = {name: load(optimized_path)} if single_file else component_graphs(optimized, name)
        comparison, rebuilt = compare_with_file(path, parts)
        runs = load_recorded_inputs(inputs, name, list(graph.inputs), required=single_file)
        feeds = {f"recorded {index}": run for index, run in enumerate(runs)}
        has_inputs = bool(feeds) or single_file or name in pipeline_folder.COMPONENTS
        if (reason := _reason_not_to_run(graph, has_inputs)) is not None:
            notes.append(f"{name}: outputs NOT compared, since {reason}.")
        elif comparison.not_rebuilt:
            notes.append(
                f"{name}: {len(comparison.not_rebuilt)} of {comparison.weights} weights were compared through outputs "
                "alone, since this sd-ort makes no such weights of the source."
            )
        passed = not comparison.different and not (reason and comparison.not_rebuilt)
        weights.append({"component": name, **vars(comparison), "passed": passed})
        if reason is not None:
            continue
        feeds = feeds or synthetic_runs(name, list(graph.inputs), model_config(path), sizes, seed)
        with (
            joined_model(optimized_path, name, notes) as joined,
            _with_unrounded_weights(joined, path, rebuilt if comparison.exact else {}, name, notes) as unrounded,
            cpu_model(unrounded, name, provider, library, notes) as runnable,
        ):
            model = load(unrounded)
            arrays = _rounded_feeds(model, list(feeds.values()))
            try:
                expected = run_model(path, arrays)
            except SdOrtError as error:
                raise InputError(
                    f"{source} itself cannot be run: {error} Record inputs that fit for --inputs."
                ) from error
            actual = run_model(runnable, arrays, provider, library)
        limit = rounding_tolerance(model) if tolerance is None else tolerance
        if any(want.keys() != got.keys() for want, got in zip(expected, actual, strict=True)):
            raise InputError(f"{name} has other outputs than its source: optimize {source} again.")
        triples = [(r, o, want[o], got[o]) for r, want, got in zip(feeds, expected, actual, strict=True) for o in want]
        errors = [compare_output(got, want, limit) for *_, want, got in triples]
        limits = [limit] * len(triples)
        half = half_type(model)
        if half is not None and tolerance is None and comparison.exact and any(map(_is_inexact, errors)):
            with _rounded_weights(path, half, optimized_path) as rounded:
                amplified = _relative_errors(run_model(rounded, arrays), expected)
            limits = [max(limit, min(ROUNDED_WEIGHTS_FACTOR * error, AMPLIFIED_LIMIT)) if np.isfinite(error) else limit
                      for error in amplified]  # fmt: skip
            errors = [compare_output(got, want, own) for (*_, want, got), own in zip(triples, limits, strict=True)]
            notes.append(
                f"{name}: its source with weights in {half.name.lower()} differs by up to {max(amplified):.1e} in "
                f"float32 arithmetic; {ROUNDED_WEIGHTS_FACTOR:g} times that is allowed, at most {AMPLIFIED_LIMIT:g}, "
                "since every weight is exact."
            )
        for (run, output, *_), compared, own in zip(triples, errors, limits, strict=True):
            rows.append({"component": name, "output": output, "run": run, "tolerance": own} | compared)
            on_row(rows[-1])
    if not rows:
        raise InputError("nothing was compared: " + " ".join(notes))
    passed = all(row["passed"] for row in (*rows, *weights))
    return {"rows": rows, "weights": weights, "notes": notes, "passed": passed}


def _reason_not_to_run(graph: ir.Graph, has_inputs: bool) -> str | None:
    """Return why outputs of two runs of a component cannot be compared, or None."""
    if not has_inputs:
        return "its inputs are not known: record some for --inputs"
    random_op = next((node.op_type for node in graph if node.op_type in RANDOM_OPS), None)
    return random_op and f"its {random_op} draws other numbers at every run"


def _relative_errors(
    actual: Sequence[Mapping[str, np.ndarray]], expected: Sequence[Mapping[str, np.ndarray]]
) -> list[float]:
    """Return the relative error of each output of each run."""
    return [
        array_errors(run[name], array)["relative_error"]
        for run, arrays in zip(actual, expected, strict=True)
        for name, array in arrays.items()
    ]


def rounding_tolerance(model: ir.Model) -> float:
    """Return the maximum relative L2 error of a model's outputs, from the dtype and depth of its arithmetic.

    In half precision every operator rounds its results by half a unit in the last place, u, at most. Residual sums and
    normalizations keep these errors from adding up: the bound is 1.5 u depth^(1/4), where depth is the longest chain of
    operators that round, 256 at least. Sums of any width are float32. Measured on fused graphs of depth 61 to 945: 0.8
    to 1.2 u depth^(1/4), in float16 up to 3.3e-3.
    """
    half = half_type(model)
    if half is None:
        return FLOAT32_TOLERANCE
    return float(ml_dtypes.finfo(half.numpy()).eps) / 2 * 1.5 * max(_depth(model.graph), MIN_DEPTH) ** 0.25


def _is_inexact(row: dict[str, Any]) -> bool:
    """Return whether an output of `compare_output` fails for its error alone."""
    return not row["passed"] and row["finite"] and np.isfinite(row["relative_error"]) and row["source_finite"]


@contextmanager
def _rounded_weights(path: Path, half: ir.DataType, optimized: Path) -> Iterator[Path]:
    """Yield a temporary copy, beside `optimized`, of the model at `path` with float32 weights rounded to `half`.

    Its error is what no arithmetic in half precision avoids. Some graphs amplify it: quantization to int8 at run time
    rounds a number near the middle of two to either, and deep convolutions without residual sums add up.
    """
    model = load(path)
    for name, value in list(model.graph.initializers.items()):
        tensor = value.const_value
        if tensor is not None and tensor.dtype == ir.DataType.FLOAT:
            value.const_value = ir.LazyTensor(
                lambda tensor=tensor, name=name: ir.tensor(  # type: ignore[misc]
                    weight_recipes.as_float32(weight_recipes.cast(half.name, tensor_values(tensor))), name=name
                ),
                dtype=ir.DataType.FLOAT,
                shape=ir.Shape(tensor.shape.numpy()),
                name=name,
            )
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.rounded-", dir=optimized.absolute().parent) as scratch:
        copy = Path(scratch) / "rounded" / pipeline_folder.MODEL
        copy.parent.mkdir()
        ir.save(model, copy, external_data=pipeline_folder.DATA)
        yield copy


def _depth(graph: ir.Graph) -> int:
    """Return the length of the longest chain of operators that round, from inputs to outputs."""
    depths: dict[ir.Value, int] = {}
    for node in graph:
        deepest = max((depths.get(value, 0) for value in node.inputs if value is not None), default=0)
        depth = deepest + (node.op_type not in COPYING_OPS)
        depths |= dict.fromkeys(node.outputs, depth)
    return max((depths.get(value, 0) for value in graph.outputs), default=0)


def compare_output(actual: np.ndarray, expected: np.ndarray, limit: float) -> dict[str, Any]:
    """Return `array_errors` with passed and reason, which is None for a row that passed."""
    errors = array_errors(actual, expected)
    reason = None
    if actual.shape != expected.shape:
        reason = f"has shape {list(actual.shape)}, its source {list(expected.shape)}"
    elif not errors["source_finite"]:
        reason = "is NaN or infinite in the source itself"
    elif not errors["finite"]:
        reason = "has NaN or infinite numbers"
    elif np.issubdtype(expected.dtype, np.inexact) and not expected.any():
        reason = "is all zeros in the source itself, which proves nothing"
    elif errors["relative_error"] > limit:
        reason = f"has a relative error of {errors['relative_error']:.1e}, allowed is {limit:.1e}"
        if errors["relative_error"] <= NEAR_MISS * limit:
            reason += " (a near miss, which rounding may explain: compare images, or allow it with --tolerance)"
    return {**errors, "passed": reason is None, "reason": reason}


def check(result: dict[str, Any]) -> None:
    """Raise VerificationError, which names the worst component, unless a result of `verify` passed."""
    for row in result["weights"]:
        if row["different"]:
            raise VerificationError(
                f"{len(row['different'])} of {row['weights']} weights of {row['component']} are not those that its "
                f"source gives, such as {row['different'][0]}: it was made of another source, or changed."
            )
        if not row["passed"]:
            raise VerificationError(
                f"{len(row['not_rebuilt'])} of {row['weights']} weights of {row['component']} were not compared: "
                f"{', '.join(row['not_rebuilt'][:5])}. Record inputs for --inputs."
            )
    failed = [row for row in result["rows"] if not row["passed"]]
    if not failed:
        return
    count = f"({len(failed)} of {len(result['rows'])} outputs fail)"
    if unusable := [row for row in failed if not row["source_finite"] or "all zeros" in row["reason"]]:
        row = unusable[0]
        raise VerificationError(
            f"{row['component']} cannot be judged: {row['output']} {row['reason']} {count}: give inputs that it is "
            "made for with --inputs."
        )
    worst = max(failed, key=lambda row: row["relative_error"])
    raise VerificationError(
        f"{worst['component']} differs from its source: {worst['output']} {worst['reason']} {count}."
    )


def _paths(source: Path, optimized: Path, components: Sequence[str] | None) -> dict[str, tuple[Path, Path]]:
    """Return the source and optimized ONNX file of each component of both folders, or of two ONNX files."""
    files = [model for path in (source, optimized) if (model := standalone_model(path)) is not None]
    if len(files) == 2 and not components:
        return {model_name(files[0]): (files[0], files[1])}
    if files:
        raise InputError(f"{source} and {optimized} cannot be compared: give two pipeline folders, or two .onnx files.")
    in_source = pipeline_folder.components(source)
    if [pipeline_folder.read_manifest(path).get("stage") for path in (source, optimized)] == ["optimize", "export"]:
        raise InputError(f"{source} is optimized, and {optimized} is an export: give the export first.")
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


def synthetic_runs(
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


def run_model(path: Path, feeds: Sequence[Arrays], provider: str = "cpu", library: bool = False) -> list[Arrays]:
    """Return the outputs of each run. A scalar timestep gets an axis for graphs that have one there (hoisted UNets)."""
    model = OrtModel(create_session(path, provider, SessionOptions(library=library)))
    one_axis = {name for name, declared in model.inputs.items() if len(declared.shape) == 1}
    return [model(**{name: np.atleast_1d(a) if name in one_axis else a for name, a in feed.items()}) for feed in feeds]


@contextmanager
def joined_model(path: Path, name: str, notes: list[str]) -> Iterator[Path]:
    """Yield `path`, or for a hoisted UNet or transformer a temporary model that joins its three graphs."""
    optimized = path.parent.parent
    parts = hoist.parts_of(optimized, name)
    if len(parts) == 1:
        yield path
        return
    for part in parts:
        pipeline_folder.check_component(optimized, part)
    notes.append(f"{name}: {', '.join(parts)} were joined to the one graph they came from.")
    with tempfile.TemporaryDirectory(prefix=".joined-", dir=optimized) as scratch:
        joined = Path(scratch) / name / pipeline_folder.MODEL
        joined.parent.mkdir()
        ir.save(hoist.join(optimized, name), joined, external_data=pipeline_folder.DATA)
        yield joined


@contextmanager
def _with_unrounded_weights(
    path: Path, source: Path, rebuilt: Mapping[str, ir.Model], name: str, notes: list[str]
) -> Iterator[Path]:
    """Yield `path`, or a temporary model that computes in the dtype of its arithmetic with the weights of `source`.

    For graphs that cast weights of half precision to float32, or dequantize weights in 4 or 8 bits, if these weights
    were found to be exact (`rebuilt` is not empty): the rest of the graph is then compared with the tolerance of its
    arithmetic.
    """
    model = load(path)
    prefixes = {folder: f"{part}." for part, folder in pipeline_folder.HOISTED.get(name, {}).items()}
    recipes = {
        (prefixes[folder] if len(rebuilt) > 1 else "") + str(value.name): recipe
        for folder, part in rebuilt.items()
        for value in part.graph.initializers.values()
        if (recipe := weight_recipes.recipe_of(value))
    }
    weights = list(model.graph.initializers.values())
    rounded = [
        v for v in weights if recipes.get(str(v.name), [""])[0] == STORED and _is_only_read_by("DequantizeLinear", v)
    ]
    half = [v for v in weights if v.dtype in HALVES]
    if all(v.name in recipes and _is_only_read_by("Cast", v, ir.DataType.FLOAT) for v in half):
        rounded += half
    if not rounded:
        yield path
        return
    tensors = {str(v.name): v.const_value for v in load(source).graph.initializers.values()}
    for value in rounded:
        for node in value.consumers():
            wide = _unrounded_weight(node.outputs[0], recipes[str(value.name)][2], tensors)  # of cast, dtype, operand
            model.graph.register_initializer(wide)
            node.outputs[0].replace_all_uses_with(wide)
    common.RemoveUnusedNodesPass()(model)
    create_session(path)
    notes.append(f"{name}: its {len(rounded)} weights in fewer bits are exact; its arithmetic ran with the source's.")
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.unrounded-", dir=path.absolute().parent) as scratch:
        copy = Path(scratch) / name / pipeline_folder.MODEL
        copy.parent.mkdir()
        ir.save(model, copy, external_data=pipeline_folder.DATA)
        yield copy


def _is_only_read_by(op_type: str, value: ir.Value, dtype: ir.DataType | None = None) -> bool:
    """Return whether all consumers of an initializer are nodes of one type, with outputs of `dtype` if it is given."""
    nodes = value.consumers()
    matches = all(node.op_type == op_type and dtype in (None, node.outputs[0].dtype) for node in nodes)
    return matches and not value.is_graph_output()


def _unrounded_weight(
    value: ir.Value, recipe: weight_recipes.WeightRecipe, tensors: Mapping[str, ir.TensorProtocol | None]
) -> ir.Value:
    """Return an initializer with the values of `recipe` on `tensors`, of the shape and dtype of `value`."""
    shape, dtype, name = value.shape, value.dtype, f"{value.name}.exact"
    assert shape is not None
    assert dtype is not None

    def read(name: str) -> np.ndarray:
        tensor = tensors[name]
        assert tensor is not None
        return tensor_values(tensor)

    def evaluate() -> ir.Tensor:
        exact = weight_recipes.as_float32(weight_recipes.evaluate(recipe, read))
        return ir.Tensor(exact.astype(dtype.numpy()), name=name)

    lazy = ir.LazyTensor(evaluate, dtype=dtype, shape=ir.Shape(shape.numpy()), name=name)
    return ir.Value(name=name, const_value=lazy, shape=lazy.shape, type=ir.TensorType(dtype))


@contextmanager
def cpu_model(path: Path, name: str, provider: str, library: bool, notes: list[str]) -> Iterator[Path]:
    """Yield `path`, or its CPU-equivalent copy for provider cpu; if the CPU has all kernels, the original must load."""
    if provider != "cpu":
        yield path
        return
    with cpu_equivalent(path) as (copy, modifications):
        notes += [f"{name}: {note}." for note in modifications]
        if copy != path and loads_on_cpu(load(path)):
            create_session(path, options=SessionOptions(library=library))
        yield copy
