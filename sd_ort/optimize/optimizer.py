"""Optimization of components: canonicalize -> fuse -> lower to a target -> convert precision -> save, two at a time.

Weights stay in their files; they are read and written one tensor at a time when the result is saved, so a component in
memory is its graph alone. Only one component is rewritten at a time, since rewriting is Python and the rewriter has
global state; meanwhile another is run for calibration or written.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import onnx_ir as ir

from fusion_passes import CONTRIB, DOMAIN, weight_recipes
from fusion_passes.canonicalize import canonicalize, unsupported_reason
from fusion_passes.canonicalize.opset import lower_opset
from fusion_passes.fuse import fuse
from fusion_passes.graph_pass import Pass, PassOutcome, run_all, totals
from fusion_passes.operators import OPERATORS, function_bodies
from fusion_passes.shapes.types import opset
from sd_ort.core import pipeline_folder
from sd_ort.core.errors import InputError
from sd_ort.core.garbage_collection import gc_disabled
from sd_ort.core.interrupts import run_interruptible
from sd_ort.core.progress import ProgressCallback
from sd_ort.graphs import hoist
from sd_ort.graphs.save import save
from sd_ort.optimize import calibration, eight_bits, precision, unoptimized, weight_storage
from sd_ort.optimize.options import OptimizeOptions
from sd_ort.optimize.targets import TARGETS, Target
from sd_ort.optimize.unoptimized import UnoptimizedComponent
from sd_ort.runtime.session import check_opens, report_invalid_model
from sd_ort.weights.recipes import fill_initializers

# Operators in `op_counts` of the manifest: nodes of the lowered graph, in any domain.
COUNTED = (
    *(operator.name for operator in OPERATORS if operator.in_summary),
    *("Attention", "LayerNormalization", "Conv", "Transpose", "QuantizeLinear"),
)
# Operators that exporters use for attention and group normalization, which passes fuse.
FUSED_SITES = {
    "attentions": ("Softmax", "Attention"),
    "group normalizations": ("InstanceNormalization", "GroupNormalization"),
}
SITE_PASSES = frozenset({"attention", "group_normalization", "group_norm", "multi_head_attention", "three_axis"})
REWRITING = threading.Lock()
OPTIONS_KEY = "sd_ort.options"  # metadata of an optimized graph: its target, dtype and values in float32, as JSON


def optimize_components(
    components: Sequence[UnoptimizedComponent], work: Path, options: OptimizeOptions, on_progress: ProgressCallback
) -> tuple[dict[str, Any], dict[str, pipeline_folder.Hashes]]:
    """Optimize components into the folder `work`; return their manifest entries and the hashes of their files.

    `options` have a target and `hoist` is a bool (see `OptimizeOptions.with_components`).
    """
    assert options.target is not None
    target = TARGETS[options.target]
    by_name = {component.name: component for component in components}
    names, largest_first = list(by_name), sorted(by_name, key=lambda name: -by_name[name].bytes)
    del components  # each is freed when it is done
    entries: dict[str, Any] = {}
    hashes: dict[str, pipeline_folder.Hashes] = {}

    def optimize_one(name: str, cancel_event: threading.Event) -> None:
        started, component = time.perf_counter(), by_name.pop(name)
        data_hashes: dict[str, str] = {}
        with report_invalid_model(component.path) if component.path else contextlib.nullcontext():
            entry = optimize_component(
                component,
                work / name / pipeline_folder.MODEL,
                target,
                options.dtype,
                calibrate=options.calibrate,
                inputs=options.inputs,
                hoisted=bool(options.hoist) and name in pipeline_folder.HOISTED,
                weights=options.weights.of_component(name) if options.weights else None,
                eight_bits_format=options.eight_bits if name in options.eight_bit_components else None,
                dynamic_scales=options.dynamic_scales,
                convolutions=options.convolutions,
                cancel_event=cancel_event,
                data_hashes=data_hashes,
            )
        for part in pipeline_folder.folders_of(name, entry):
            _raise_if_cancelled(cancel_event)
            check_opens(work / part / pipeline_folder.MODEL)
            hashes[part] = pipeline_folder.file_hashes(work / part, {pipeline_folder.DATA: data_hashes[part]})
        entry["seconds"] = round(time.perf_counter() - started, 2)
        entries[name] = entry
        on_progress(f"{name}: {entry['nodes_before']} -> {entry['nodes']} nodes in {entry['seconds']} s")

    run_interruptible(optimize_one, largest_first, at_once=2)
    return {name: entries[name] for name in names}, hashes


def optimize_component(
    source: Path | UnoptimizedComponent,
    output: Path,
    target: Target,
    dtype: str = "float32",
    *,
    calibrate: bool | None = None,
    inputs: Path | None = None,
    hoisted: bool = False,
    cancel_event: threading.Event | None = None,
    embed: bool = False,
    float32_io: bool = False,
    data_hashes: dict[str, str] | None = None,
    weights: weight_storage.WeightStorage | None = None,
    eight_bits_format: str | None = None,
    dynamic_scales: bool = False,
    convolutions: bool = False,
) -> dict[str, Any]:
    """Optimize one ONNX model into the file `output`; return its manifest entry.

    Args:
        calibrate, inputs: As in `OptimizeOptions`.
        hoisted: Write the parts of a hoisted UNet or transformer next to `output`'s folder.
        cancel_event: Set by another thread to cancel; `output` is then incomplete.
        embed: Write the weights into `output` itself.
        float32_io: Keep the graph's inputs and outputs in float32 with dtype float16.
        weights: Storage of weights in fewer bits.
        data_hashes: Receives the SHA-256 of each external data file that is written, by component name.
        eight_bits_format: A name of `fusion_passes.quantized_weights` for the layers.
        dynamic_scales: Compute the scales of activations in 8 bits in the graph, else from recorded runs in `inputs`.
        convolutions: As in `OptimizeOptions`.

    Raises:
        CancelledError: Soon after `cancel_event` is set.
    """
    if isinstance(source, Path):
        source = unoptimized.file_component(source)

    def find_float32(model: ir.Model) -> calibration.Calibration:
        return calibration.calibrate(model, source, output.parent, enabled=calibrate, recorded=inputs)

    quantization = None
    if eight_bits_format is not None:
        ranges = None
        if not dynamic_scales:
            if inputs is None:
                raise InputError(f"{source.name} in 8 bits needs recorded runs of it: give --inputs.")
            ranges = eight_bits.calibrated_ranges(source.name, eight_bits_format, inputs, output.parent)
        quantization = eight_bits.EightBits(eight_bits_format, ranges, convolutions)
    output.parent.mkdir(parents=True, exist_ok=True)
    parts, entry = rewrite(
        source,
        output.parent.name,
        target,
        dtype,
        find_float32,
        hoisted,
        cancel_event,
        float32_io,
        weights=weights,
        quantization=quantization,
    )
    for name, part in parts.items():
        path = output.parent.with_name(name) / output.name
        digest = save(part, path, lambda: _raise_if_cancelled(cancel_event), embed=embed)
        if digest and data_hashes is not None:
            data_hashes[name] = digest
    nodes = Counter(node.op_type for part in parts.values() for node in part.graph)
    entry |= {
        "nodes": sum(nodes.values()),
        "op_counts": {op: nodes[op] for op in COUNTED if nodes[op]},
        "weight_recipes": weight_recipes.dump(weight_recipes.collect(parts.values())),
    }
    return entry | ({"hoisted": {name: len(part.graph) for name, part in parts.items()}} if hoisted else {})


def rewrite(
    source: UnoptimizedComponent,
    name: str,
    target: Target,
    dtype: str,
    find_float32: Callable[[ir.Model], calibration.Calibration],
    hoisted: bool = False,
    cancel_event: threading.Event | None = None,
    float32_io: bool = False,
    *,
    weights: weight_storage.WeightStorage | None = None,
    quantization: eight_bits.EightBits | None = None,
) -> tuple[dict[str, ir.Model], dict[str, Any]]:
    """Return the optimized graphs of a component by folder, with lazy weights, and the manifest entry without counts.

    name: folder of the graph unless it is hoisted. find_float32: returns the nodes that a float16 graph computes in
    float32. float32_io, weights: as in `optimize_component`. quantization: of the layers to 8 bits.
    """
    model = source.model()
    before, version = Counter(node.op_type for node in model.graph), opset(model.graph)
    _raise_if_cancelled(cancel_event)
    with REWRITING, gc_disabled():  # which walks the graph again and again: a quarter of the time
        canonical = canonicalize(model)
        not_fused = unsupported_reason(model)
        fused = fuse(model, target.fusions)
        low_coverage = low_coverage_message(before, Counter(node.op_type for node in model.graph))
        if low_coverage is not None and (reasons := main_reasons(canonical, fused)):
            low_coverage += f" ({'; '.join(reasons)})"
        passes, late = target.passes_for(dtype), tuple[Pass, ...]()
        if weights is not None:
            passes = weights.passes(passes)
        if quantization is not None:
            passes, late = eight_bits.passes_around(passes, target.name, dtype, quantization.format)
        lowered = run_all(model, passes)
    _raise_if_cancelled(cancel_event)
    computes_half = dtype != "float32" and not target.half_storage_only
    result = find_float32(model) if computes_half and dtype == "float16" else None
    sites = result.sites if result else []
    quantized = None
    if quantization is not None:
        quantized = eight_bits.quantize(model, target.name, quantization, result.nodes if result else ())
        with REWRITING, gc_disabled():
            lowered |= run_all(model, late)
    _raise_if_cancelled(cancel_event)
    if computes_half:
        float32_nodes = result.nodes if result else ()
        precision.convert(
            model, dtype, float32_nodes=float32_nodes, float32_inputs=target.float32_inputs, float32_io=float32_io
        )
    if target.newest_opset is not None and (reason := lower_opset(model, target.newest_opset)):
        raise InputError(f"{source.name} cannot be lowered for target {target.name}: {reason}.")
    kernel_fallbacks = lower_operators(model, target)
    if name not in pipeline_folder.COMPONENTS and dtype != "bfloat16":
        _keep_fast_opset(model, target, version)
    names = pipeline_folder.HOISTED.get(name, hoist.PARTS)
    parts = {names[key]: part for key, part in hoist.split(model).items()} if hoisted else {name: model}
    _raise_if_cancelled(cancel_event)
    for part in parts.values():
        if dtype != "float32" and target.half_storage_only:
            precision.store_weights(part, dtype)
        if weights is not None:
            weight_storage.store_weights(part, weights)
        if source.read is not None:
            fill_initializers(part, source.read)
        options = {"target": target.name, "dtype": dtype, "float32_io": float32_io}
        options["float32_sites"] = [site["value"] for site in sites]
        if weights is not None:
            options["weights"] = weights.entry()
        if quantized is not None:
            options["eight_bits"] = quantized.options()
        part.metadata_props[OPTIONS_KEY] = json.dumps(options)
    return parts, {
        "nodes_before": before.total(),
        "rewrite_counts": totals(canonical, fused, lowered),
        "kernel_fallbacks": kernel_fallbacks,
        **({"not_fused": not_fused} if not_fused else {}),
        **({"low_coverage": low_coverage} if low_coverage else {}),
        **({"calibration": result.note, "float32_sites": sites} if result else {}),
        **({"eight_bits": quantized.manifest_entry()} if quantized else {}),
    }


def low_coverage_message(before: Mapping[str, int], after: Mapping[str, int]) -> str | None:
    """Return how many attentions or group normalizations were fused if it is less than half of them, else None.

    `before`, `after`: nodes by operator in the exported and in the fused graph.
    """
    messages = []
    for name, operators in FUSED_SITES.items():
        sites, unfused = (sum(counts.get(op, 0) for op in operators) for counts in (before, after))
        if sites and unfused > sites / 2:
            messages.append(f"{max(sites - unfused, 0)} of {sites} {name}")
    return ", ".join(messages) or None


def main_reasons(*outcomes: Mapping[str, PassOutcome]) -> list[str]:
    """Return the three most frequent reasons why an attention or group normalization was not fused, with numbers."""
    reasons: Counter[str] = Counter()
    for by_name in outcomes:
        for name in SITE_PASSES & by_name.keys():
            reasons.update(r.reason for r in by_name[name].rejections if r.node.graph is not None)
    return [f"{count} times {reason}" for reason, count in reasons.most_common(3)]


def lower_operators(model: ir.Model, target: Target) -> list[str]:
    """Lower each fused node to the provider's own kernel if its constraint allows, else to a function body.

    Returns why nodes of operators that have such a kernel did not get it, with the number of nodes.
    """
    reasons: Counter[tuple[str, str]] = Counter()
    own_nodes = []
    for node in model.graph:
        if node.domain != DOMAIN:
            continue
        constraint = target.contrib_constraints.get(node.op_type)
        reason = constraint(node) if constraint is not None else None
        if constraint is not None and reason is None:
            node.domain = CONTRIB
            _drop_unread_outputs(node)
            model.graph.opset_imports.setdefault(CONTRIB, 1)
        else:
            own_nodes.append(node)
            if reason:
                reasons[node.op_type, reason] += 1
    function_bodies.attach(model, own_nodes)
    return [f"{count} {op_type}: {reason}" for (op_type, reason), count in reasons.items()]


def _keep_fast_opset(model: ir.Model, target: Target, version: int) -> None:
    """Lower the opset of a graph to one in which an operator has a faster kernel.

    The source's opset `version` must be as old, and no operator may need a newer one. Components of pipelines are
    joined with graphs of newer opsets.
    """
    fast = {target.fast_opsets[node.op_type] for node in model.graph if node.op_type in target.fast_opsets}
    if fast and version <= min(fast):
        lower_opset(model, min(fast))


def _drop_unread_outputs(node: ir.Node) -> None:
    """Remove the outputs after the last one that is read, so that no kernel computes a sum that nothing reads."""
    read = [i for i, output in enumerate(node.outputs) if output.uses() or output.is_graph_output()]
    node.resize_outputs(max(read, default=0) + 1)


def _raise_if_cancelled(cancel_event: threading.Event | None) -> None:
    if cancel_event is not None and cancel_event.is_set():
        raise CancelledError
