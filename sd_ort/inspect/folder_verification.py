"""Checks of an optimized folder or ONNX file without its source, and the record of its verification in the manifest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sd_ort.checkpoints.configs import model_config
from sd_ort.checkpoints.recorded_inputs import load_recorded_inputs
from sd_ort.checkpoints.synthetic_inputs import SIZES
from sd_ort.core import pipeline_folder
from sd_ort.core.errors import InputError, VerificationError
from sd_ort.core.files import write_json
from sd_ort.core.ownership import sha256
from sd_ort.core.package_version import package_version
from sd_ort.core.pipeline_folder import model_name, standalone_model
from sd_ort.graphs import hoist
from sd_ort.graphs.load import load
from sd_ort.inspect.verify import cpu_model, joined_model, run_model, synthetic_runs
from sd_ort.runtime.session import check_opens

KEY = "verified"  # of a component in the manifest


def verify_folder(
    optimized: Path,
    *,
    components: Sequence[str] | None = None,
    inputs: Path | None = None,
    provider: str = "cpu",
    library: bool = True,
    seed: int = 0,
    on_row: Callable[[dict[str, Any]], None] = lambda row: None,
) -> dict[str, Any]:
    """Check structure, hashes and outputs of a pipeline folder or ONNX file; return {"rows", "notes", "passed"}.

    A row is one output of one run: component, output, run, shape, finite, passed. Arguments are those of
    `verify.verify`.

    Raises:
        InputError: for an invalid graph, one that ONNX Runtime rejects, and if nothing could be run.
        VerificationError: for a file that differs from its hash in the manifest, or that has none.
    """
    file = standalone_model(optimized)
    manifest = {} if file is not None else pipeline_folder.read_manifest(optimized)
    notes, rows = [] if manifest else [f"{optimized} has no manifest, so no hashes were compared."], []
    paths = {model_name(file): file} if file else _component_paths(optimized, components)
    if manifest:
        check_hashes(optimized, manifest, list(paths))
    for name, path in paths.items():
        model = load(path)
        check_opens(path)
        if hoist.is_part(path.parent.parent, name):
            continue  # it runs as a part of the UNet or transformer
        notes.append(f"{name}: {describe(manifest.get('components', {}).get(name, {}))}")
        values = list(model.graph.inputs)
        runs = load_recorded_inputs(inputs, name, values, required=file is not None)
        try:
            with joined_model(path, name, notes) as joined, cpu_model(joined, name, provider, library, notes) as copy:
                values = list(load(joined).graph.inputs)
                feeds = {f"recorded {index}": run for index, run in enumerate(runs)} or synthetic_runs(
                    name, values, model_config(path), SIZES, seed
                )
                results = run_model(copy, list(feeds.values()), provider, library)
        except InputError as error:
            if runs:
                raise
            notes.append(f"{name}: NOT run: {error}")
            continue
        for run, outputs in zip(feeds, results, strict=True):
            for output, array in outputs.items():
                finite = bool(np.isfinite(array).all()) if np.issubdtype(array.dtype, np.inexact) else True
                rows.append({"component": name, "output": output, "run": run, "shape": list(array.shape),
                             "finite": finite, "passed": finite})  # fmt: skip
                on_row(rows[-1])
    if not rows:
        raise InputError("nothing was run: " + " ".join(notes))
    return {"rows": rows, "notes": notes, "passed": all(row["passed"] for row in rows)}


def check_finite(result: dict[str, Any]) -> None:
    """Raise VerificationError that names the first output of a result of `verify_folder` with NaN or infinity."""
    failed = [row for row in result["rows"] if not row["passed"]]
    if failed:
        raise VerificationError(
            f"{failed[0]['component']}: {failed[0]['output']} has NaN or infinite numbers "
            f"({len(failed)} of {len(result['rows'])} outputs): compare it with its source: sd-ort verify IN OUT."
        )


def check_hashes(folder: Path, manifest: Mapping[str, Any], components: Sequence[str]) -> None:
    """Raise VerificationError for a component's file that is missing, differs from its hash or has none."""
    recorded = manifest.get("files", {})
    for name in components:
        existing = {path.name for path in (folder / name).iterdir() if path.is_file()}
        for file in sorted(existing | set(recorded.get(name, {}))):
            path, entry = folder / name / file, recorded.get(name, {}).get(file)
            if entry is None or file not in existing:
                problem = "is missing" if entry else "has no hash in the manifest"
            elif path.stat().st_size == entry["bytes"] and sha256(path) == entry["sha256"]:
                continue
            else:
                problem = "was changed since it was written"
            raise VerificationError(f"{path} {problem}: optimize again.")


def record_verification(optimized: Path, source: str, result: Mapping[str, Any], provider: str | None) -> str | None:
    """Write how each component of a result of `verify` or `verify_weights` was verified to the manifest.

    A component that failed loses its record. Returns why nothing was written, or None. provider: None if nothing ran.
    """
    if standalone_model(optimized) is not None or not (optimized / pipeline_folder.MANIFEST).is_file():
        return "only a folder that sd-ort wrote has a manifest"
    path = optimized / pipeline_folder.MANIFEST
    manifest = pipeline_folder.read_manifest(optimized)
    weights = {row["component"]: row for row in result.get("weights", result["rows"])}
    for name, row in weights.items():
        entry = manifest.get("components", {}).get(name)
        outputs = [each for each in result["rows"] if each["component"] == name and "output" in each]
        if entry is None:
            continue
        entry.pop(KEY, None)
        if row["passed"] and all(each["passed"] for each in outputs):
            record = {"source": source, "weights": row["weights"], "not_rebuilt": len(row["not_rebuilt"])}
            if outputs:
                worst = max(outputs, key=lambda each: each["relative_error"])
                record |= {"relative_error": worst["relative_error"], "tolerance": worst["tolerance"]}
                record["provider"] = provider
            entry[KEY] = record | {"sd-ort": package_version("sd-ort")}
    try:
        write_json(path, manifest)
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}"
    return None


def describe(entry: Mapping[str, Any]) -> str:
    """Return how a component was verified, from its manifest entry."""
    record = entry.get(KEY)
    if record is None:
        return "not verified against its source yet (sd-ort verify IN OUT)."
    exact = record["weights"] - record["not_rebuilt"]
    text = f"{exact} of {record['weights']} weights were equal to those that {record['source']} gives"
    if "relative_error" in record:
        text += f"; outputs differed by {record['relative_error']:.1e} (allowed {record['tolerance']:.1e}, provider "
        text += f"{record['provider']})"
    return f"{text}; sd-ort {record['sd-ort']}."


def _component_paths(folder: Path, components: Sequence[str] | None) -> dict[str, Path]:
    names = pipeline_folder.select_components(folder, components)
    return {name: pipeline_folder.check_component(folder, name) for name in names}
