"""Verify: every optimized component against its source, on the same inputs at several shapes.

One session is in memory at a time: the source runs first and leaves its outputs behind. Where the CPU stands in for a
target whose own kernels it lacks, those nodes run as the function bodies of the same operators, and the result says so.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from fusion_passes import bodies
from fusion_passes._rule import DOMAIN
from sd_ort import folder
from sd_ort.errors import InputError, ProviderError, VerificationError
from sd_ort.inputs import SIZES, Arrays, component_config, random_inputs, recorded_inputs
from sd_ort.session import Model, create_session

FLOAT32_TOLERANCE = 1e-5  # relative L2 error; fusing reorders sums, measured at 1e-6 to 4e-6
HALF_TOLERANCE = 3e-3  # a float16 mantissa has 11 bits; measured at 3e-4 to 2e-3
CONTRIB = "com.microsoft"
# Fused operators for which ONNX Runtime 1.31's CPU provider has no kernel; MultiHeadAttention lacks the packed forms.
NOT_ON_CPU = frozenset({"GroupNorm", "SkipGroupNorm", "BiasSplitGelu", "BiasAdd", "NhwcConv"})


def verify(
    source: Path,
    optimized: Path,
    *,
    tolerance: float | None = None,
    components: Sequence[str] | None = None,
    inputs: Path | None = None,
    provider: str = "cpu",
    portable: bool = False,
    sizes: Sequence[dict[str, int]] = SIZES,
    seed: int = 0,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> dict[str, Any]:
    """Compare the components of two pipeline folders; returns {"rows": [...], "notes": [...], "passed": bool}.

    A row is one output of one run: component, output, run (its sizes), shape, relative_error = |got - want| / |want|
    (L2 norms), nmse (its square), max_abs, finite, tolerance, passed. `tolerance` bounds relative_error and defaults
    to FLOAT32_TOLERANCE, or HALF_TOLERANCE where the optimized component is in half precision. `inputs`: runs recorded
    in an .npz, in addition to made-up inputs at `sizes`. `provider` runs the optimized folder; the source runs on the
    CPU, fed with the same numbers. `portable`: fused operators run as their function bodies even where a custom-op
    library is installed. `report` gets every row when it is known.

    Raises InputError for folders that are not two forms of one pipeline, ProviderError for what the provider cannot
    run. A failure to agree is not an exception here: see `check`.
    """
    names = _common(source, optimized, components)
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for name in names:
        path = folder.check_component(optimized, name)
        model = ir.load(path)
        feeds = _feeds(source, name, model, inputs, sizes, seed)
        with _runnable(path, model, provider, notes) as runnable:
            expected = _run(folder.check_component(source, name), [feed for _, feed in feeds])
            actual = _run(runnable, [feed for _, feed in feeds], provider, portable)
        limit = tolerance if tolerance is not None else HALF_TOLERANCE if _is_half(model) else FLOAT32_TOLERANCE
        for (run, _), want, got in zip(feeds, expected, actual, strict=True):
            if want.keys() != got.keys():
                raise InputError(f"{name} has other outputs than its source: optimize {source} again.")
            for output in want:
                row = {"component": name, "output": output, "run": run, "tolerance": limit}
                row |= compare(got[output], want[output])
                row["passed"] = bool(row["finite"] and row["relative_error"] <= limit)
                rows.append(row)
                report(row)
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
    """(description, arrays) of each run. Numbers are rounded to what the optimized inputs can hold, so both get the same."""
    config = component_config(source, name)
    graph_inputs = list(ir.load(source / name / folder.MODEL).graph.inputs)
    runs = []
    for size in sizes:
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


def _run(path: Path, feeds: Sequence[Arrays], provider: str = "cpu", portable: bool = True) -> list[Arrays]:
    """Outputs of every run; the session is gone afterwards."""
    model = Model(create_session(path, provider, portable=portable))
    return [model(**feed) for feed in feeds]


def _is_half(model: ir.Model) -> bool:
    halves = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    return any(
        v.dtype in halves for v in [*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()]
    )


@contextmanager
def _runnable(path: Path, model: ir.Model, provider: str, notes: list[str]) -> Iterator[Path]:
    """The model at `path`, or on the CPU a twin of it that spells out what the CPU has no kernel for.

    Raises ProviderError for bfloat16 on the CPU, which no spelling makes run.
    """
    if provider != "cpu":
        yield path
        return
    if any(v.dtype == ir.DataType.BFLOAT16 for v in [*model.graph.inputs, *model.graph.initializers.values()]):
        raise ProviderError(
            f"{path.parent.name} is in bfloat16, for which ONNX Runtime's CPU provider has no kernels: "
            "verify it with --provider cuda or rocm, or verify the float16 or float32 form."
        )
    foreign = [node for node in model.graph if _not_on_cpu(node)]
    if not foreign:
        yield path
        return
    kinds = sorted({node.op_type for node in foreign})
    notes.append(f"{path.parent.name}: {', '.join(kinds)} have no CPU kernels; their function bodies ran instead.")
    for node in foreign:
        node.domain = DOMAIN
    bodies.attach(model, foreign)
    with tempfile.TemporaryDirectory(prefix=f".{path.parent.name}.twin-", dir=path.parent.parent) as scratch:
        twin = Path(scratch) / path.parent.name / folder.MODEL
        twin.parent.mkdir()
        for data in path.parent.iterdir():
            if data.is_file() and data.name != folder.MODEL:
                link_or_copy(data, twin.parent / data.name)
        ir.save(model, twin)
        yield twin


def _not_on_cpu(node: ir.Node) -> bool:
    if node.domain != CONTRIB:
        return False
    packed = node.op_type == "MultiHeadAttention" and (len(node.inputs) < 3 or node.inputs[2] is None)
    return packed or node.op_type in NOT_ON_CPU


def link_or_copy(source: Path, target: Path) -> None:
    """A hard link where the file system allows one: weights are gigabytes."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
