"""Report on fusion sites: the nodes that a fusion took or could take, by torch module, with the reason if unfused.

The source is fused again in memory, which is deterministic and reads no weights. Module names come from the metadata of
torch.onnx's dynamo exporter or the node names of its TorchScript exporter; they are only shown.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir

from fusion_passes import DOMAIN
from fusion_passes.canonicalize import canonicalize, unsupported_reason
from fusion_passes.fuse import FUSIONS, fuse
from fusion_passes.graph_pass import PassOutcome
from sd_ort.core import pipeline_folder
from sd_ort.core.errors import InputError
from sd_ort.export.templates import Template, find_template_file
from sd_ort.graphs import hoist
from sd_ort.graphs.load import load
from sd_ort.graphs.scopes import scope
from sd_ort.inspect import rejection_reasons
from sd_ort.inspect.node_assignment import assign_nodes
from sd_ort.optimize.targets import TARGETS, Target
from sd_ort.runtime.session import report_invalid_model

# Operators that mark an unfused site: the fusion that usually takes them, and the usual reason for no match.
UNFUSED_OPS: Mapping[str, tuple[str, str]] = {
    "Softmax": ("attention", "no two matrix products around it"),
    "Attention": ("attention", "no rule takes this form"),
    "ScaledDotProductAttention": (
        "multi_head_attention",
        "its heads are not split and merged by Reshape and Transpose",
    ),
    "InstanceNormalization": (
        "group_normalization",
        "not between two Reshapes and an affine of one number per channel",
    ),
    "GroupNormalization": ("group_normalization", "its affine is not constant"),
    "LayerNormalization": ("skip_layer_normalization", "no sum of two feature maps before it"),
    "Erf": ("gelu", "not the formula x/2 (1 + erf(x/sqrt 2))"),
    "Gelu": ("bias_split_gelu", "no gate: it is not multiplied by the other half of a split tensor"),
    "Sigmoid": ("group_norm", "no normalization before its product"),
    "Transpose": ("transposes", "the layout changes here"),
    "Shape": ("", "a size that is only known at run time"),
}
# Operators of UNFUSED_OPS that lowering adds and removes when it changes the layout.
LAYOUT_OPS = frozenset({"Transpose", "Shape"})
REASON, NEAR_MISSES = "sd_ort.reason", "sd_ort.near_misses"  # keys of a node's metadata, in memory only


def explain(path: Path, components: list[str] | None = None, provider: str | None = None) -> dict[str, Any]:
    """Return sites and operator counts of a pipeline folder by component, or of one ONNX file.

    An entry has: before, after, fused and unfused_ops (node counts by operator), sites (list of scope, op, fused,
    reason or None, value, and near_misses if there are any, see `rejection_reasons`), lowered (by pass of the target:
    rewrote, counts by rule, and unfused, a list of scope, op, reason, value), note; for an optimized folder also
    target and kernel_fallbacks; with `provider`, which must be the sd-ort provider or rocm, placement (see
    `node_assignment`).

    Raises:
        InputError: if `path` is neither, or an optimized folder whose source no longer exists.
    """
    if (model := pipeline_folder.standalone_model(path)) is not None:
        return {"components": {pipeline_folder.model_name(model): _component(model, None, {}, provider)}}
    manifest = pipeline_folder.read_manifest(path) if path.is_dir() else {}
    names = [name for name in pipeline_folder.components(path) if not hoist.is_part(path, name)]
    pipeline_folder.check_not_merged(path, names)
    missing = [name for name in components or () if name not in names]
    if missing:
        raise InputError(f"{path} has no component {', '.join(missing)}: it has {', '.join(names)}.")
    entries = {}
    for name in [name for name in names if not components or name in components]:
        model = pipeline_folder.check_component(path, name)
        if manifest.get("stage") != "optimize":
            entries[name] = _component(model, None, {}, provider)
            continue
        entries[name] = _component(_source(path, name, manifest), model, manifest, provider)
    return {"components": entries}


def _source(path: Path, name: str, manifest: Mapping[str, Any]) -> Path | Template:
    """Return the ONNX file of an export, or the template, that a component of the optimized folder `path` is made of.

    Raises InputError if it no longer exists.
    """
    origin = manifest.get("source", {})
    if folder := origin.get("folder"):
        if not (Path(folder) / name / pipeline_folder.MODEL).is_file():
            raise InputError(f"{path} was made from {folder}, which is gone: restore it, or explain another export.")
        return pipeline_folder.check_component(Path(folder), name)
    template = manifest.get("options", {}).get("templates", {}).get(name)
    if (file := find_template_file(template or "")) is None:
        export = f"sd-ort export {origin.get('model', 'MODEL')} RAW"
        raise InputError(f"{path} was made without a folder of {name}'s unfused graph: run `{export}` and explain RAW.")
    return Template(file)


def _component(
    source: Path | Template, optimized: Path | None, manifest: Mapping[str, Any], provider: str | None
) -> dict[str, Any]:
    checked = source if isinstance(source, Path) else optimized
    assert checked is not None
    files = [checked] if optimized is None else _graphs(optimized)
    target = TARGETS.get(manifest.get("options", {}).get("target", ""))
    with report_invalid_model(checked):
        model = load(source) if isinstance(source, Path) else source.graph(None)
        before = Counter(node.op_type for node in model.graph)
        outcomes = canonicalize(model)
        outcomes |= fuse(model, FUSIONS if target is None else target.fusions)
        _record_reasons(model, outcomes)
        lowered = {} if target is None else _lower(model, target)
        component_sites = sites(model)
        after = list(model.graph) if optimized is None else [node for path in files for node in load(path).graph]
    counts = Counter(f"{node.domain}.{node.op_type}" if node.domain else node.op_type for node in after)
    entry = {
        "before": dict(before.most_common()),
        "after": dict(counts.most_common()),
        "fused": dict(Counter(site["op"] for site in component_sites if site["fused"]).most_common()),
        "unfused_ops": dict(Counter(site["op"] for site in component_sites if not site["fused"]).most_common()),
        "sites": component_sites,
        "lowered": lowered,
    }
    if optimized is not None:
        written = manifest.get("components", {}).get(optimized.parent.name, {})
        entry |= {
            "target": manifest.get("options", {}).get("target"),
            "kernel_fallbacks": written.get("kernel_fallbacks", []),
        }
        entry |= {key: written[key] for key in ("calibration", "float32_sites") if key in written}
    return entry if provider is None else entry | {"placement": assign_nodes(files, provider)}


def _graphs(path: Path) -> list[Path]:
    """Return the files of an optimized component: three if it is hoisted."""
    root = path.parent.parent
    return [root / part / pipeline_folder.MODEL for part in hoist.parts_of(root, path.parent.name)]


def sites(model: ir.Model) -> list[dict[str, Any]]:
    """Return the sites of a fused model in graph order: fused nodes, and nodes of UNFUSED_OPS with their reasons."""
    report = []
    for node in model.graph:
        reason = UNFUSED_OPS[node.op_type][1] if node.op_type in LAYOUT_OPS else node.metadata_props.get(REASON)
        is_fused = reason is None and (node.domain == DOMAIN or node.op_type in UNFUSED_OPS)
        if reason is None and not is_fused:
            continue
        site = {"scope": scope(node), "op": node.op_type, "fused": is_fused, "reason": reason}
        near = json.loads(node.metadata_props.get(NEAR_MISSES, "[]"))
        report.append({**site, "value": node.outputs[0].name, **({"near_misses": near} if near else {})})
    return report


def _record_reasons(model: ir.Model, outcomes: Mapping[str, PassOutcome]) -> None:
    """Set the reason at every node of UNFUSED_OPS; lowering copies the metadata to the nodes that replace them."""
    unsupported = unsupported_reason(model)
    for node in model.graph:
        if node.op_type not in UNFUSED_OPS or node.op_type in LAYOUT_OPS:
            continue
        fusion, usual_reason = UNFUSED_OPS[node.op_type]
        near = rejection_reasons.near_misses(node, outcomes, fusion)
        best = next((entry for entry in near if entry["pass"] == fusion), None)
        if best is None:
            reason = rejection_reasons.unknown_inputs(node) or rejection_reasons.default_reason(node, usual_reason)
        else:
            reason = ": ".join(filter(None, (best["reason"], best["unknown_value"])))
        node.metadata_props[REASON] = unsupported or reason
        node.metadata_props[NEAR_MISSES] = json.dumps(near)


def _lower(model: ir.Model, target: Target) -> dict[str, Any]:
    """Run the target's passes; return by pass the rewrite counts, and the unfused sites.

    `inline_fused_ops` is skipped: the operators that it inlines stay one site.
    """
    lowered = {}
    for lowering in target.lowering_passes:
        if lowering.name == "inline_fused_ops":
            continue
        outcome = lowering.run(model)
        unfused = [
            {"scope": scope(r.node), "op": r.node.op_type, "reason": r.reason, "value": r.node.outputs[0].name}
            for r in outcome.rejections
        ]
        lowered[lowering.name] = {"rewrote": dict(outcome.counts), "unfused": unfused}
    return lowered
