"""Explain: every site that a fusion could take, by the module it came from; fused or not, and the reason why not.

Sites are read off the fused graph, made again in memory from the source: fusion is deterministic and reads no weights.
Module names come from the metadata of torch.onnx's dynamo exporter, or from the node names of the TorchScript one; they
are shown, and decide nothing.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir

import fusion_passes
from fusion_passes import DOMAIN
from fusion_passes.graph_pass import PassOutcome
from sd_ort.core import pipeline_folder
from sd_ort.core.errors import InputError
from sd_ort.graphs import hoist
from sd_ort.graphs.load import load
from sd_ort.graphs.scopes import scope
from sd_ort.inspect import rejection_reasons
from sd_ort.inspect.node_assignment import placement
from sd_ort.optimize.targets import TARGETS, Target
from sd_ort.runtime.session import blaming

# Operators that stand for a site when they are left: the fusion that takes them, and why it usually finds no match.
LEFT: Mapping[str, tuple[str, str]] = {
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
# Of these, what lowering makes and removes as it changes the layout.
MOVED = frozenset({"Transpose", "Shape"})
REASON, NEAR = "sd_ort.reason", "sd_ort.near"  # in a node's metadata, here in memory only


def explain(path: Path, components: list[str] | None = None, provider: str | None = None) -> dict[str, Any]:
    """Sites and operator counts of a pipeline folder by component, or of one ONNX file.

    An entry has: before, after (operator -> number of nodes), fused (operator -> number), left (operator -> number),
    sites (list of component sites: scope, op, fused, reason or None, value, near: what refused it, see
    `reasons.near_misses`, where something did), lowered (pass of the target -> rewrote:
    what -> number, left: list of scope, op, reason, value), target and not_lowered (of an optimized folder), note,
    placement (with `provider`, one of ours, which opens the graphs as they are: see `check.placement`).
    Raises InputError for what is neither, and for an optimized folder whose source is gone.
    """
    if (model := pipeline_folder.bare_model(path)) is not None:
        with blaming(model):
            entry = _component(model, None, {})
        return {"components": {pipeline_folder.model_name(model): entry | _placement([model], provider)}}
    manifest = pipeline_folder.read_manifest(path) if path.is_dir() else {}
    names = [name for name in pipeline_folder.components(path) if not _is_hoisted_part(path, name)]
    missing = [name for name in components or () if name not in names]
    if missing:
        raise InputError(f"{path} has no component {', '.join(missing)}: it has {', '.join(names)}.")
    entries = {}
    for name in [name for name in names if not components or name in components]:
        model = pipeline_folder.check_component(path, name)
        if manifest.get("stage") != "optimize":
            with blaming(model):
                entries[name] = _component(model, None, {})
            entries[name] |= _placement([model], provider)
            continue
        source = Path(manifest.get("source", {}).get("folder") or path)
        if not (source / name / pipeline_folder.MODEL).is_file():
            raise InputError(f"{path} was made from {source}, which is gone: restore it, or explain another export.")
        raw = pipeline_folder.check_component(source, name)
        with blaming(raw):
            entries[name] = _component(raw, model, manifest)
        entries[name] |= _placement(_graphs(model), provider)
    return {"components": entries}


def _placement(models: list[Path], provider: str | None) -> dict[str, Any]:
    return {} if provider is None else {"placement": placement(models, provider)}


def _component(source: Path, optimized: Path | None, manifest: Mapping[str, Any]) -> dict[str, Any]:
    model = load(source)
    target = TARGETS.get(manifest.get("options", {}).get("target", ""))
    before = Counter(node.op_type for node in model.graph)
    refused = fusion_passes.canonicalize(model)
    refused |= fusion_passes.fuse(model, fusion_passes.FUSIONS if target is None else target.fusions)
    _mark(model, refused)
    lowered = {} if target is None else _lower(model, target)
    found = sites(model)
    after = [node for path in _graphs(optimized) for node in load(path).graph] if optimized else list(model.graph)
    counts = Counter(f"{node.domain}.{node.op_type}" if node.domain else node.op_type for node in after)
    entry = {
        "before": dict(before.most_common()),
        "after": dict(counts.most_common()),
        "fused": dict(Counter(site["op"] for site in found if site["fused"]).most_common()),
        "left": dict(Counter(site["op"] for site in found if not site["fused"]).most_common()),
        "sites": found,
        "lowered": lowered,
    }
    if optimized is not None:
        mine = manifest.get("components", {}).get(optimized.parent.name, {})
        entry |= {
            "target": manifest.get("options", {}).get("target"),
            "kernel_fallbacks": mine.get("kernel_fallbacks", []),
        }
        entry |= {key: mine[key] for key in ("calibration", "float32_sites") if key in mine}
    return entry


def _is_hoisted_part(path: Path, name: str) -> bool:
    """Whether a component is what `optimize --hoist` took out of the UNet: it is explained with the UNet."""
    return name in (hoist.PARTS["prompt"], hoist.PARTS["time"]) and hoist.is_hoisted(path)


def _graphs(path: Path) -> list[Path]:
    """The files of an optimized component: of a hoisted UNet those of its three graphs."""
    root, component = path.parent.parent, path.parent.name
    parts = hoist.PARTS.values() if component == hoist.PARTS["step"] and hoist.is_hoisted(root) else [component]
    return [root / part / pipeline_folder.MODEL for part in parts]


def sites(model: ir.Model) -> list[dict[str, Any]]:
    """The sites of a fused model in graph order: fused nodes, and operators of `LEFT` with the reason for each."""
    found = []
    for node in model.graph:
        reason = LEFT[node.op_type][1] if node.op_type in MOVED else node.metadata_props.get(REASON)
        is_fused = reason is None and (node.domain == DOMAIN or node.op_type in LEFT)
        if reason is None and not is_fused:
            continue
        site = {"scope": scope(node), "op": node.op_type, "fused": is_fused, "reason": reason}
        near = json.loads(node.metadata_props.get(NEAR, "[]"))
        found.append({**site, "value": node.outputs[0].name, **({"near": near} if near else {})})
    return found


def _mark(model: ir.Model, refused: Mapping[str, PassOutcome]) -> None:
    """Note at every node of `LEFT` why it was left: lowering hands the note on to what takes the node's place."""
    old = fusion_passes.why_not_fused(model)
    for node in model.graph:
        if node.op_type in LEFT and node.op_type not in MOVED:
            near = rejection_reasons.near_misses(node, refused, LEFT[node.op_type][0])
            node.metadata_props[REASON] = old or _reason(node, near)
            node.metadata_props[NEAR] = json.dumps(near)


def _reason(node: ir.Node, near: list[dict[str, Any]]) -> str:
    """The best near miss with where its proof ended; without one what is unknown, or what usually is the matter."""
    fusion, usual = LEFT[node.op_type]
    best = next((entry for entry in near if entry["pass"] == fusion), None)
    if best is None:
        return rejection_reasons.unknown_inputs(node) or rejection_reasons.usual(node, usual)
    return best["reason"] if best["ended"] is None else f"{best['reason']}: {best['ended']}"


def _lower(model: ir.Model, target: Target) -> dict[str, Any]:
    """Run the target's passes; by pass: how often it rewrote what, and the sites that it left.

    What is taken apart stays one site here: it was left for a reason.
    """
    lowered = {}
    for each in target.lowering_passes:
        if each.name == "inline_fused_ops":
            continue
        outcome = each.run(model)
        left = [
            {"scope": scope(one.node), "op": one.node.op_type, "reason": one.reason, "value": one.node.outputs[0].name}
            for one in outcome.rejections
        ]
        lowered[each.name] = {"rewrote": dict(outcome.counts), "left": left}
    return lowered
