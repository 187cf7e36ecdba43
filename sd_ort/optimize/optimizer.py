"""Optimize: canonicalize -> fuse -> lower(target) -> precision -> save, two components at a time.

Weights stay where they are on disk: they are read and streamed, one tensor at a time, when the result is saved. A
component's model in memory is its graph alone. Rewriting takes turns, since it is Python and matching keeps its state
in globals of the rewriter; while one component is rewritten another is run for calibration or written.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import onnx_ir as ir

from fusion_passes import CONTRIB, DOMAIN
from fusion_passes import weight_recipes as recipes
from fusion_passes.canonicalize import canonicalize, why_not_fused
from fusion_passes.canonicalize.opset import lower_opset
from fusion_passes.fuse import fuse
from fusion_passes.graph_pass import run_all, totals
from fusion_passes.operators import OPERATORS, function_bodies
from sd_ort.checkpoints.config_inference import guessed_configs
from sd_ort.checkpoints.recorded_inputs import check_recorded
from sd_ort.core import pipeline_folder
from sd_ort.core.errors import InputError
from sd_ort.core.interrupts import in_threads
from sd_ort.core.paths import output_path
from sd_ort.graphs import hoist
from sd_ort.graphs.load import load
from sd_ort.graphs.save import save
from sd_ort.graphs.timestep import make_timestep_1d
from sd_ort.optimize import calibration, precision, unoptimized
from sd_ort.optimize.targets import TARGETS, Target, default_target
from sd_ort.optimize.unoptimized import Raw
from sd_ort.runtime.provider_table import PROVIDERS
from sd_ort.runtime.session import blaming, check_opens
from sd_ort.weights.recipes import fill

# The rows of the table of counts: what is left in the lowered graph, whatever its domain.
COUNTED = (
    *(operator.name for operator in OPERATORS if operator.in_summary),
    *("Attention", "LayerNormalization", "Conv", "Transpose"),
)
# What exporters make attention and group normalization from, by the name that a user knows.
SITES = {
    "attentions": ("Softmax", "Attention"),
    "group normalizations": ("InstanceNormalization", "GroupNormalization"),
}
Report = Callable[[str], None]
REWRITING = threading.Lock()

# Targets whose providers keep a hoisted UNet's results on the device: MIGraphX does not.
HOISTING = ("cuda", "rocm", "hip", "gpu")


def optimize(
    source: Path,
    output: Path,
    *,
    target: str | None = None,
    dtype: str = "float32",
    components: list[str] | None = None,
    calibrate: bool | None = None,
    inputs: Path | None = None,
    hoisted: bool | None = None,
    report: Report = lambda line: None,
) -> dict[str, Any]:
    """Fuse every component of the pipeline folder `source` into the folder `output`, and return its manifest.

    target: a name in `TARGETS`; None: what the installed ONNX Runtime wheel drives. dtype: "float32", "float16" or
    "bfloat16", one that the target has. calibrate: whether float16 conversion runs each component to find what must
    stay in float32 (None: the components that are small enough), on made-up inputs or on the recorded `inputs` (see
    `family.inputs`). hoisted: split the UNet into a graph that runs once per prompt, one per schedule and
    one that runs every step (see `graphs.hoist`); None: in float16 for the targets in `HOISTING`. An `output` that was
    made from the same input with the same options and is intact is left as it is. Raises InputError for a source that
    cannot be read and OutputError when the output cannot be written; then nothing is left behind.
    """
    target, why = chosen_target(target, dtype, bool(calibrate or inputs))
    output = output_path(output, source)
    names = pipeline_folder.components(source)
    if components:
        missing = [name for name in components if name not in names]
        if missing:
            raise InputError(f"{source} has no component {', '.join(missing)}: it has {', '.join(names)}.")
        names = components
    if inputs:
        check_recorded(inputs, names)
    if hoist.is_hoisted(source):
        raise InputError(f"{source} is hoisted already: optimize the folder it was made from with --hoist.")
    asked, hoisted = hoisted, chosen_hoisting(hoisted, dtype, target, names)
    raws = unoptimized.of_folder(source, names)
    if (
        hoisted
        and not asked
        and not make_timestep_1d(load(pipeline_folder.check_component(source, hoist.PARTS["step"])))
    ):
        why += " The UNet is not hoisted, since it computes with its timestep, which has no axis, at once."
        hoisted = False
    options = {
        "target": target,
        "dtype": dtype,
        "components": names,
        "calibrate": calibrate,
        "inputs": pipeline_folder.sha256(inputs) if inputs else None,
        "hoist": hoisted,
    }
    manifest = _manifest(source, names, options)
    if _is_done(output, manifest):
        report(f"{output} is up to date.")
        return pipeline_folder.read_manifest(output)
    with pipeline_folder.staged(output, source) as work:
        if why:
            report(why.strip())
        pipeline_folder.copy_configs(source, work, names)
        for name, config in guessed_configs(source).items():  # what was made of a graph no longer shows it
            if name in names:
                (work / name).mkdir()
                (work / name / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        manifest["components"], hashes = optimize_all(
            raws, work, TARGETS[target], dtype, calibrate=calibrate, inputs=inputs, hoisted=hoisted, report=report
        )
        pipeline_folder.write_manifest(work, manifest, hashes)
    return pipeline_folder.read_manifest(output)


def chosen_target(target: str | None, dtype: str, calibrated: bool) -> tuple[str, str]:
    """The name of the target asked for, or by default; and of a default the line to report, once the input is known to
    be well. Raises InputError for one that is none or cannot do `dtype`, and where calibration, asked for, would do
    nothing."""
    line = ""
    if target is None:
        target, why = default_target()
        line = f"target {target}: {why}."
    if target not in TARGETS:
        counterpart = PROVIDERS[target].target if target in PROVIDERS else None
        if counterpart:
            raise InputError(f"{target} is a provider, not a target: its target is {counterpart}.")
        raise InputError(f"unknown target {target!r}: choose one of {', '.join(TARGETS)}.")
    if dtype not in TARGETS[target].dtypes:
        others = ", ".join(name for name, each in TARGETS.items() if dtype in each.dtypes)
        raise InputError(f"target {target} has kernels without {dtype}: use --float16, or a target of {others}.")
    if TARGETS[target].half_weights and calibrated:
        raise InputError(f"target {target} computes in float32, where nothing overflows: leave calibration out.")
    if dtype != "float16" and calibrated:
        raise InputError(f"calibration is for --float16: {dtype} has the range of float32, so leave it out.")
    return target, line


def chosen_hoisting(hoisted: bool | None, dtype: str, target: str, names: Sequence[str]) -> bool:
    """Whether the UNet is split. Raises InputError when there is none to split."""
    if hoisted is None:
        hoisted = dtype == "float16" and target in HOISTING and hoist.PARTS["step"] in names
    if hoisted and hoist.PARTS["step"] not in names:
        raise InputError("--hoist splits the UNet: take it into --component, or leave out --hoist.")
    if hoisted and dtype == "bfloat16" and not TARGETS[target].half_weights:
        raise InputError("--hoist passes tensors between graphs, which ONNX Runtime cannot in bfloat16: use --float16.")
    return hoisted


def optimize_all(
    raws: Sequence[Raw],
    work: Path,
    target: Target,
    dtype: str,
    *,
    calibrate: bool | None = None,
    inputs: Path | None = None,
    hoisted: bool = False,
    report: Report = lambda line: None,
) -> tuple[dict[str, Any], dict[str, pipeline_folder.Hashes]]:
    """Optimize components into the folder `work`; returns their entries of the manifest and their files' hashes.
    Options as for `optimize`."""
    by_name = {each.name: each for each in raws}
    names, largest_first = list(by_name), sorted(by_name, key=lambda name: -by_name[name].bytes)
    del raws  # what a component holds of its checkpoint goes when it is done
    entries: dict[str, Any] = {}
    hashes: dict[str, pipeline_folder.Hashes] = {}

    def make(name: str, stopped: threading.Event) -> None:
        started, each = time.perf_counter(), by_name.pop(name)
        data: dict[str, str] = {}
        with blaming(each.path) if each.path else contextlib.nullcontext():
            entry = optimize_component(
                each,
                work / name / pipeline_folder.MODEL,
                target,
                dtype,
                calibrate=calibrate,
                inputs=inputs,
                hoisted=hoisted and name == hoist.PARTS["step"],
                stopped=stopped,
                data_hashes=data,
            )
        for written in pipeline_folder.folders_of(name, entry):
            _go_on(stopped)
            check_opens(work / written / pipeline_folder.MODEL)
            hashes[written] = pipeline_folder.file_hashes(work / written, {pipeline_folder.DATA: data[written]})
        entry["seconds"] = round(time.perf_counter() - started, 2)
        entries[name] = entry
        report(f"{name}: {entry['nodes_before']} -> {entry['nodes']} nodes in {entry['seconds']} s")

    in_threads(make, largest_first, at_once=2)
    return {name: entries[name] for name in names}, hashes


def _manifest(source: Path, names: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """What the output will say of itself, without its components."""
    described = pipeline_folder.read_manifest(source).get("source", {"model": str(source)})
    return {
        "stage": "optimize",
        "source": {**described, "folder": str(source.resolve()), "hash": _hash(source, names)},
        "versions": {name: importlib.metadata.version(name) for name in ("sd-ort", "onnx", "onnx-ir", "onnxscript")},
        "options": options,
        "components": {},
    }


def optimize_component(
    source: Path | Raw,
    output: Path,
    target: Target,
    dtype: str = "float32",
    *,
    calibrate: bool | None = None,
    inputs: Path | None = None,
    hoisted: bool = False,
    stopped: threading.Event | None = None,
    embed: bool = False,
    data_hashes: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Optimize one `model.onnx` into another; returns counts by rule and by operator. Options as for `optimize`.

    embed: put the weights into `output` itself, where none of the source's lies in a file of its own. data_hashes:
    takes the SHA-256 of each data file that is written, by its component's name.

    Raises CancelledError soon after another thread set `stopped`; the output is then incomplete.
    """
    if isinstance(source, Path):
        source = unoptimized.of_file(source)
    model = source.model()
    before = Counter(node.op_type for node in model.graph)
    _go_on(stopped)
    with REWRITING, _uncollected():
        canonical = canonicalize(model)
        not_fused = why_not_fused(model)
        fused = fuse(model, target.fusions)
        few = why_few(before, Counter(node.op_type for node in model.graph))
        lowered = run_all(model, target.passes_for(dtype))
    _go_on(stopped)
    output.parent.mkdir(parents=True, exist_ok=True)
    measured = None
    if dtype == "float16" and not target.half_weights:
        measured = calibration.calibrate(model, source, output.parent, wanted=calibrate, recorded=inputs)
    if dtype != "float32" and not target.half_weights:
        keep = measured.nodes if measured else ()
        precision.convert(model, dtype, keep=keep, float32_inputs=target.float32_inputs)
    if target.newest_opset is not None and (reason := lower_opset(model, target.newest_opset)):
        raise InputError(f"{source.name} cannot be lowered for target {target.name}: {reason}.")
    kept = lower_operators(model, target)
    parts = {hoist.PARTS[name]: part for name, part in hoist.split(model).items()} if hoisted else {}
    _go_on(stopped)
    for name, part in (parts or {output.parent.name: model}).items():
        if dtype != "float32" and target.half_weights:
            precision.store_weights(part, dtype)
        if source.read is not None:
            fill(part, source.read)
        digest = save(part, output.parent.with_name(name) / output.name, lambda: _go_on(stopped), embed=embed)
        if digest and data_hashes is not None:
            data_hashes[name] = digest
    nodes = Counter(node.op_type for part in (parts.values() or [model]) for node in part.graph)
    return {
        "nodes_before": before.total(),
        "nodes": sum(nodes.values()),
        "rules": totals(canonical, fused, lowered),
        "counts": {op: nodes[op] for op in COUNTED if nodes[op]},
        "not_lowered": kept,
        "weights": recipes.dump(recipes.collect(parts.values() or [model])),
        **({"not_fused": not_fused} if not_fused else {}),
        **({"few": few} if few else {}),
        **({"hoisted": {name: len(part.graph) for name, part in parts.items()}} if hoisted else {}),
        **({"calibration": measured.note, "float32_sites": measured.sites} if measured else {}),
    }


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's collector of cycles, which walks the whole graph again and again: a quarter of the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def why_few(before: Mapping[str, int], after: Mapping[str, int]) -> str | None:
    """What was fused where that is less than half of what looks like attention, or like normalization; else None.

    `before`, `after`: operators of the source and of the fused graph. An attention is a Softmax or an Attention, a
    normalization of groups what exporters make it from.
    """
    few = []
    for name, operators in SITES.items():
        there, left = (sum(counts.get(op, 0) for op in operators) for counts in (before, after))
        if there and left > there / 2:
            few.append(f"{max(there - left, 0)} of {there} {name}")
    return ", ".join(few) or None


def lower_operators(model: ir.Model, target: Target) -> list[str]:
    """Give each fused node the provider's own kernel where its limits allow, else a function body.

    Returns the reasons why nodes whose operator has a kernel in general could not take it, with their number.
    """
    reasons: Counter[tuple[str, str]] = Counter()
    ours = []
    for node in model.graph:
        if node.domain != DOMAIN:
            continue
        limit = target.contrib.get(node.op_type)
        reason = "no limit" if limit is None else limit(node)
        if limit is not None and reason is None:
            node.domain = CONTRIB
            _drop_unread_outputs(node)
            model.graph.opset_imports.setdefault(CONTRIB, 1)
        else:
            ours.append(node)
            if limit is not None and reason:
                reasons[node.op_type, reason] += 1
    function_bodies.attach(model, ours)
    return [f"{count} {op_type}: {reason}" for (op_type, reason), count in reasons.items()]


def _drop_unread_outputs(node: ir.Node) -> None:
    """Cut the outputs behind the last one that is read: a sum that nobody reads need not be computed."""
    read = [i for i, output in enumerate(node.outputs) if output.uses() or output.is_graph_output()]
    node.resize_outputs(max(read, default=0) + 1)


def _go_on(stopped: threading.Event | None) -> None:
    if stopped is not None and stopped.is_set():
        raise CancelledError


def _hash(source: Path, names: list[str]) -> dict[str, str]:
    """What tells this input from another: the SHA-256 of each component's files, when the manifest has them.

    Folders of other tools have none: there the graph is hashed, and size and time stand for the weights, gigabytes.
    """
    recorded = pipeline_folder.read_manifest(source).get("files", {})
    hashes = {}
    for name in names:
        files = recorded.get(name, {})
        if pipeline_folder.MODEL in files:
            hashes[name] = "+".join(files[f]["sha256"][:16] for f in sorted(files))
        else:
            others = [p for p in sorted((source / name).rglob("*")) if p.is_file() and p.name != pipeline_folder.MODEL]
            marks = [f"{p.name}:{p.stat().st_size}:{p.stat().st_mtime_ns}" for p in others]
            hashes[name] = "+".join([pipeline_folder.sha256(source / name / pipeline_folder.MODEL)[:16], *marks])
    return hashes


def _is_done(output: Path, manifest: dict[str, Any]) -> bool:
    try:
        there = pipeline_folder.read_manifest(output) if output.is_dir() else {}
    except InputError:
        return False
    same = all(there.get(key) == manifest[key] for key in ("stage", "source", "versions", "options"))
    return same and pipeline_folder.is_intact(output, there)
