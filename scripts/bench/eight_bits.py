"""The demo's U-Net in 8 bits: images of unseen prompts, and each layer's error. Writes results/eight_bits.md.

    python scripts/bench/eight_bits.py                     # 200 prompts in float8 and int8, then the layers
    python scripts/bench/eight_bits.py --prompts 20 --layers 0
    python scripts/bench/eight_bits.py --worst 118 171 164 23 0 1 2 3 --out results/eight_bits_worst.md
    python scripts/bench/eight_bits.py --engines "int8 operators" --formats --out results/eight_bits_cpu.md
    python scripts/bench/eight_bits.py --recipes --prompts 8 --formats float8 --out results/eight_bits_layers.md

Generates the same unseen prompts from the same seeds with the fused float32 pipeline and with the U-Net in 8 bits,
calibrated on 64 prompts of the training's combinations, on the CPU. Images are read back (`sd_ort.demo.fidelity`) and
compared with float32's. `portable` folders run QuantizeLinear and DequantizeLinear around layers that compute in
float32; `cpu` folders run QuantizedLinear, the operator of GPU targets, and in int8 QuantizedConv, the CPU's: their
kernels, without the op library their bodies.

The table of layers quantizes one layer (or group of layers) of the float32 graph. Its error is that of its output on
recorded runs, the U-Net's error that of the noise prediction, both relative (L2), and the PSNR is that of an image with
few steps. Results of a work folder are kept: an interrupted run goes on.

With --worst, the numbers of unseen prompts whose int8 images are far from float32's (and of others), it says which
layers do it: images of the first of them with a group of layers left in float32, and of all with clipped ranges, with
the ranges that `optimize` takes, and with layers in float32.

With --recipes, it measures every layer alone, those that stay in 16 bits too, and the U-Net with the layers that the
published recipes for SDXL quantize.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from fusion_passes.eight_bits.layers import CONVOLUTIONS, LINEARS, Layer, channel_axis, find_layers
from fusion_passes.eight_bits.qdq import insert_qdq
from fusion_passes.quantized_weights import FORMATS
from scripts.report import head, table
from sd_ort import StableDiffusionPipeline, demo
from sd_ort.checkpoints.recorded_inputs import Arrays, load_recorded_inputs
from sd_ort.core import files, metrics, pipeline_folder
from sd_ort.demo.fidelity import score, unseen_prompts
from sd_ort.demo.scenes import training_prompts
from sd_ort.graphs.load import load
from sd_ort.optimize.activation_ranges import PERCENTILES, measure_ranges
from sd_ort.pipelines.calibration_runs import record_runs
from sd_ort.runtime import session
from sd_ort.stages import optimize

CALIBRATION_PROMPTS = 64
BATCH = 10
LAYER_RUNS = 3  # recorded runs for the errors of a layer
LAYER_STEPS = 8  # denoising steps of the image for a layer
LAYER_PROMPT = "a large red circle left of a small blue square on a white background"
ENGINES = {
    "float8": ("portable", "float8"),
    "int8": ("portable", "int8"),
    "float8 operators": ("cpu", "float8"),
    "int8 operators": ("cpu", "int8"),
}
BLOCK, KIND, ANY = map(
    re.compile, (r"(down|up)_blocks\.\d|mid_block", r"attn\d|ff\.net\.\d|proj|conv\d|samplers", ".+")
)
# Kinds of layers, of which the first that matches a module's name counts, and whether the published recipes for SDXL
# compute them in 8 bits: MLPerf 5.1's by NVIDIA, and TheStage's. None: the description does not say. LAST is the last
# block up, up_blocks.2 in SDXL.
RECIPES = ("MLPerf's", "TheStage's")
KINDS: dict[str, tuple[str, bool | None, bool | None]] = {
    "conv_in": (r"conv_in", False, False),
    "conv_out": (r"conv_out", False, False),
    "time_embedding.linear_1": (r"time_embedding\.linear_1", False, False),
    "time_embedding.linear_2": (r"time_embedding\.linear_2", False, True),
    "time_emb_proj": (r".*time_emb_proj", False, True),
    "conv_shortcut": (r".*conv_shortcut", False, False),
    "down_blocks.0.downsamplers": (r"down_blocks\.0\.downsamplers.*", None, False),
    "other samplers": (r".*samplers.*", None, True),
    "LAST.resnets.2.conv1": (r"LAST\.resnets\.2\.conv1", False, True),
    "LAST.resnets.2.conv2": (r"LAST\.resnets\.2\.conv2", False, False),
    "other resnets' convolutions": (r".*resnets.*", True, True),
    "the text's keys and values": (r".*attn2\.to_[kv]", True, True),
    "other transformers' layers": (r".+", True, True),
}
DYNAMIC = "ours with `--dynamic-scales`"
NO_SHAPES = "its channels"  # rejections by the shape alone are no choice


def images(folder: Path, prompts: Sequence[str], cache: Path) -> np.ndarray:
    """Return the images (B, H, W, 3) of prompts, image i from seed i; those of earlier runs from `cache`."""
    if cache.is_file():
        return np.load(cache)
    pipeline = StableDiffusionPipeline.from_pretrained(folder, "cpu")
    arrays: list[np.ndarray] = []
    for start in range(0, len(prompts), BATCH):
        part = list(prompts[start : start + BATCH])
        result = pipeline(
            part, height=demo.HEIGHT, width=demo.WIDTH, num_inference_steps=demo.STEPS, guidance_scale=demo.GUIDANCE,
            generator=[start + i for i in range(len(part))], progress=False,
        )  # fmt: skip
        arrays += [np.asarray(image) for image in result.images]
        print(f"{folder.name}: {len(arrays)} of {len(prompts)}", flush=True)
    np.save(cache, np.stack(arrays))
    return np.stack(arrays)


def fidelity_row(
    label: str, prompts: Sequence[str], generated: np.ndarray, reference: np.ndarray | None
) -> dict[str, Any]:
    """Return the entry of an engine: images read back as their prompt, and PSNR beside the reference."""
    row: dict[str, Any] = {"label": label, "right": score(prompts, generated).correct, "total": len(prompts)}
    if reference is not None:
        values = [metrics.psnr(ours, theirs) for ours, theirs in zip(generated, reference, strict=True)]
        row |= {"median_db": median(values), "min_db": min(values), "tenth_db": float(np.percentile(values, 10))}
    return row


def layer_table(work: Path, runs: Path, format_: str, limit: int | None, prompt: str) -> list[dict[str, Any]]:
    """Return a row for each layer and group: name, op, error, unet_error, psnr_db of the image of `prompt`."""
    model = layer_graph(work / "float32" / "unet" / pipeline_folder.MODEL)
    groups, singles = layer_groups(model)
    return measured_alone(work, runs, format_, model, groups | dict(list(singles.items())[:limit]), prompt)


def measured_alone(
    work: Path, runs: Path, format_: str, model: ir.Model, groups: dict[str, list[Layer]], prompt: str
) -> list[dict[str, Any]]:
    """Return a row for each group, which is quantized alone, see `layer_table`; those of earlier runs from `work`."""
    names = list(dict.fromkeys(str(layer.x.name) for layers in groups.values() for layer in layers))
    feeds = load_recorded_inputs(runs, "unet", list(model.graph.inputs), required=True)
    ranges = cached_ranges(work / f"ranges-{format_}.json", model, names, feeds, format_)
    feeds = sampled_runs(feeds)
    folder = layer_folder(work, format_)
    pipeline = StableDiffusionPipeline.from_pretrained(folder, "cpu")
    rows_file = work / f"layers-{format_}.json"
    rows: list[dict[str, Any]] = json.loads(rows_file.read_text()) if rows_file.is_file() else []
    done = {row["name"] for row in rows}
    layers_of_all = [layer for layers in groups.values() for layer in layers]
    expected = _run(pipeline, folder, model, layers_of_all, feeds, prompt)
    for name, layers in groups.items():
        if name in done:
            continue
        copy, copies = quantized_copy(model, layers, format_, ranges)
        actual = _run(pipeline, folder, copy, copies if len(copies) == 1 else [], feeds, prompt)
        output = str(layers[0].node.outputs[0].name)
        rows.append(
            {
                "name": name,
                "op": layers[0].node.op_type if len(layers) == 1 else f"{len(layers)} layers",
                "error": metrics.relative_l2_error(actual[output], expected[output]) if len(layers) == 1 else None,
                "unet_error": metrics.relative_l2_error(actual["out_sample"], expected["out_sample"]),
                "psnr_db": metrics.psnr(actual["image"], expected["image"]),
            }
        )
        rows_file.write_text(json.dumps(rows))
        print(rows[-1], flush=True)
    return [row for row in rows if row["name"] in groups]


def sampled_runs(feeds: list[Arrays]) -> list[Arrays]:
    """Return LAYER_RUNS of the recorded runs, evenly spaced."""
    return feeds[:: max(len(feeds) // LAYER_RUNS, 1)][:LAYER_RUNS]


def kind_of(module: str, last: str) -> str:
    """Return the kind, of KINDS, of a module. last: name of the last block up."""
    name = module.replace(f"{last}.", "LAST.")
    return next(kind for kind, (pattern, *_) in KINDS.items() if re.fullmatch(pattern, name))


@dataclass(frozen=True)
class AllLayers:
    """Each layer of a graph by its module's name, why some stay in 16 bits, and the names by kind."""

    model: ir.Model
    layers: dict[str, Layer]
    reasons: dict[str, str]
    kinds: dict[str, list[str]]
    last: str

    @property
    def ours(self) -> list[str]:
        """Names of the layers that `optimize` quantizes."""
        return [name for name in self.layers if name not in self.reasons]

    def of_recipe(self, index: int) -> list[str]:
        """Return the names of the layers that a recipe quantizes, and ours if it does not say."""
        says = {name: KINDS[kind][1 + index] for kind, names in self.kinds.items() for name in names}
        return [name for name in self.layers if (name not in self.reasons if says[name] is None else says[name])]

    def differences(self) -> list[str]:
        """Return the kinds of layers for which a recipe and our rules choose different bits."""
        return [
            kind
            for kind, names in self.kinds.items()
            for ours in [{name not in self.reasons for name in names}]
            if any(bits is not None and {bits} != ours for bits in KINDS[kind][1:])
        ]


def all_unet_layers(work: Path) -> AllLayers:
    """Return all layers of the U-Net in float32."""
    model = layer_graph(work / "float32" / "unet" / pipeline_folder.MODEL)
    groups, singles = layer_groups(model)
    layers, reasons = {name: each[0] for name, each in singles.items()}, dict[str, str]()
    for group, each in list(groups.items())[1:]:
        for layer in each:
            name = module_name(layer.node)
            layers[name], reasons[name] = layer, group.removeprefix("not quantized: ")
    last = max(re.findall(r"up_blocks\.\d", " ".join(layers)))
    kinds: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for name in layers:
        kinds[kind_of(name, last)].append(name)
    return AllLayers(model, layers, reasons, kinds, last)


def recipes_head(all_layers: AllLayers, count: int) -> list[str]:
    """Return the first lines of the page of `recipe_table`."""
    differences = [kind.replace("LAST", all_layers.last) for kind in all_layers.differences()]
    return [
        "# The demo's U-Net in 8 bits: each layer, beside the published recipes for SDXL", "",
        f"Ours differs from a published recipe in {len(differences)} kinds of layers: {', '.join(differences)}. "
        "`ours`: the rules of fusion_passes/eight_bits/layers.py. MLPerf's (5.1, by NVIDIA) and TheStage's: what "
        "their descriptions say, with the last block up for SDXL's `up_blocks.2`. MLPerf's also computes the products "
        "of attention in float8, which ours does not. All use the same scales here: weights a scale an output "
        f"channel, activations a scale a tensor, calibrated on {CALIBRATION_PROMPTS} prompts.", "",
        "Errors are relative (L2), beside float32. A layer's error is that of its output, the U-Net's that of the "
        f"noise prediction, over {LAYER_RUNS} recorded runs. PSNR by recipe is of {count} unseen prompts with "
        f"{demo.STEPS} steps, and of layers that of one image of {LAYER_STEPS} steps.",
    ]  # fmt: skip


def recipe_table(work: Path, runs: Path, format_: str, all_layers: AllLayers, count: int) -> list[str]:
    """Return the lines of a format: the U-Net by recipe, images of `count` prompts; kinds of layers; single layers."""
    groups = {f"kind: {kind}": [all_layers.layers[name] for name in names] for kind, names in all_layers.kinds.items()}
    groups |= {name: [layer] for name, layer in all_layers.layers.items()}
    by_name = {row["name"]: row for row in measured_alone(work, runs, format_, all_layers.model, groups, LAYER_PROMPT)}
    kind_rows = []
    for kind, names in all_layers.kinds.items():
        own, alone = by_name[f"kind: {kind}"], [by_name[name] for name in names]
        errors = [row["error"] for row in alone]
        in_16_bits = sum(name in all_layers.reasons for name in names)
        kind_rows.append(
            (kind.replace("LAST", all_layers.last), str(len(names)),
             {0: "8", len(names): "16"}.get(in_16_bits, f"16: {in_16_bits}"),
             *("not said" if bits is None else "8" if bits else "16" for bits in KINDS[kind][1:]),
             f"{median(errors):.2e}", f"{max(errors):.2e}", f"{own['unet_error']:.2e}",
             f"{min(own['psnr_db'], 99.9):.1f}", f"{min(*(row['psnr_db'] for row in alone), 99.9):.1f}")
        )  # fmt: skip
    columns = (
        "layers", "number", "bits: ours", *RECIPES, "a layer's error, median", "largest", "U-Net's error, all of them",
        "PSNR, dB, all of them", "PSNR, dB, the worst alone",
    )  # fmt: skip
    layer_cells = (
        (name, row["op"], "16" if name in all_layers.reasons else "8", f"{row['error']:.2e}",
         f"{row['unet_error']:.2e}", f"{min(row['psnr_db'], 99.9):.1f}")
        for row in sorted(by_name.values(), key=lambda row: -row["unet_error"])
        if (name := row["name"]) in all_layers.layers
    )  # fmt: skip
    return [
        "", f"## {format_}: the U-Net by recipe", "", *unet_table(work, runs, format_, all_layers, count),
        "", f"## {format_}: kinds of layers alone", "", *table(columns, kind_rows),
        "", f"## {format_}: single layers", "",
        *table(("layer", "operator", "bits: ours", "error", "U-Net's error", "PSNR, dB"), layer_cells),
    ]  # fmt: skip


def unet_table(work: Path, runs: Path, format_: str, all_layers: AllLayers, count: int) -> list[str]:
    """Return a table of U-Nets in 8 bits: our layers, those of each recipe, and ours with one difference each."""
    chosen = {"**ours**": all_layers.ours, DYNAMIC: all_layers.ours} | {
        recipe: all_layers.of_recipe(i) for i, recipe in enumerate(RECIPES)
    }
    chosen["all layers"] = list(all_layers.layers)
    for kind in all_layers.differences():
        names, label = all_layers.kinds[kind], kind.replace("LAST", all_layers.last)
        if all_layers.reasons.keys().isdisjoint(names):
            chosen[f"ours without {label}"] = [name for name in all_layers.ours if name not in names]
        else:
            chosen[f"ours and {label}"] = list(dict.fromkeys([*all_layers.ours, *names]))
    feeds = sampled_runs(load_recorded_inputs(runs, "unet", list(all_layers.model.graph.inputs), required=True))
    ranges = json.loads((work / f"ranges-{format_}.json").read_text())
    folder = layer_folder(work, format_)
    pipeline = StableDiffusionPipeline.from_pretrained(folder, "cpu")

    def run(graph: ir.Model) -> tuple[np.ndarray, list[np.ndarray]]:
        unet, outputs = run_graph(folder / "unet" / pipeline_folder.MODEL, graph, [], feeds)
        pipeline.models["unet"] = unet
        drawing = pipeline(
            unseen_prompts(count, 0), height=demo.HEIGHT, width=demo.WIDTH, num_inference_steps=demo.STEPS,
            guidance_scale=demo.GUIDANCE, generator=list(range(count)), progress=False,
        )  # fmt: skip
        return outputs["out_sample"], [np.asarray(image) for image in drawing.images]

    expected, reference = run(all_layers.model)
    rows = []
    for label, names in chosen.items():
        scales = None if label == DYNAMIC else ranges
        copy, _ = quantized_copy(all_layers.model, [all_layers.layers[name] for name in names], format_, scales)
        got, images = run(copy)
        values = [metrics.psnr(mine, theirs) for mine, theirs in zip(images, reference, strict=True)]
        rows.append(
            (label, f"{len(names)} of {len(all_layers.layers)}", f"{metrics.relative_l2_error(got, expected):.2e}",
             f"{median(values):.1f}", f"{min(values):.1f}")
        )  # fmt: skip
        print(rows[-1], flush=True)
    return table(("layers in 8 bits", "number", "U-Net's error", "median PSNR, dB", "worst"), rows)


def layer_graph(path: Path) -> ir.Model:
    """Return the graph of a file for `layer_groups`, with unique names."""
    model = load(path)
    common.NameFixPass()(model)
    for value in (value for node in model.graph for value in node.outputs[1:-1]):
        if not value.uses() and not value.is_graph_output():
            value.name = ""  # a name asks for the statistics of SkipLayerNormalization
    return model


def layer_groups(model: ir.Model) -> tuple[dict[str, list[Layer]], dict[str, list[Layer]]]:
    """Return layers by group (all quantized ones; rejected ones by reason), and each quantized layer by its name."""
    layers = find_layers(model.graph, CONVOLUTIONS | LINEARS)
    groups: dict[str, list[Layer]] = {"all that are quantized": list(layers.accepted)}
    for rejection in layers.rejections:
        weight = rejection.node.inputs[1]
        if weight is not None and weight.is_initializer() and not rejection.reason.startswith(NO_SHAPES):
            groups.setdefault(f"not quantized: {rejection.reason}", []).append(
                Layer(rejection.node, channel_axis(rejection.node))
            )
    return groups, {module_name(layer.node): [layer] for layer in layers.accepted}


def module_name(node: ir.Node) -> str:
    """Return the name of the torch module that a node computes, else of its output."""
    scopes = re.findall(r"'model\.([^']+)'", node.metadata_props.get("pkg.torch.onnx.name_scopes", ""))
    return scopes[-1] if scopes else str(node.outputs[0].name)


def cached_ranges(
    file: Path, model: ir.Model, names: Sequence[str], feeds: Sequence[Any], format_: str, *, clip_gates: bool = False
) -> dict[str, float]:
    """Return the ranges of `names` over `feeds`, from `file` if an earlier run wrote it."""
    if not file.is_file():
        measured = measure_ranges(model, names, feeds, file.parent, PERCENTILES[format_], clip_gates=clip_gates)
        file.write_text(json.dumps(measured))
    return dict(json.loads(file.read_text()))


def layer_folder(work: Path, format_: str) -> Path:
    """Return a copy of the float32 folder with the session options of an 8-bit folder."""
    folder = work / "layer"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(work / "float32", folder)
    manifest = pipeline_folder.read_manifest(folder)
    manifest = {**manifest, "files": {}, "options": {**manifest["options"], "eight_bits": format_}}
    (folder / pipeline_folder.MANIFEST).write_text(json.dumps(manifest))
    return folder


def quantized_copy(
    model: ir.Model, layers: Sequence[Layer], format_: str, ranges: dict[str, float] | None
) -> tuple[ir.Model, list[Layer]]:
    """Return a copy of the graph with `layers` in 8 bits, and these layers of the copy. Scales are dynamic for None."""
    copy = model.clone()
    nodes = {node.outputs[0].name: node for node in copy.graph}
    copies = [Layer(nodes[layer.node.outputs[0].name], layer.axis) for layer in layers]
    insert_qdq(copy.graph, copies, FORMATS[format_], ranges)
    return copy, copies


def run_graph(
    path: Path, model: ir.Model, layers: Sequence[Layer], feeds: Sequence[Any]
) -> tuple[session.OrtModel, dict[str, Any]]:
    """Write a graph to `path`; return its session and its outputs and those of `layers`, flat, over the runs."""
    copy = model.clone()
    nodes = {node.outputs[0].name: node for node in copy.graph}
    outputs = [nodes[layer.node.outputs[0].name].outputs[0] for layer in layers]
    copy.graph.outputs.extend(value for value in outputs if not value.is_graph_output())
    for file in path.parent.glob("model.onnx*"):
        file.unlink()
    ir.save(copy, path, external_data=pipeline_folder.DATA)
    run = session.OrtModel(session.create_session(path, "cpu"))
    results = [run(**feed) for feed in feeds]
    return run, {name: np.concatenate([result[name].ravel() for result in results]) for name in results[0]}


def _run(
    pipeline: Any, folder: Path, model: ir.Model, layers: Sequence[Layer], feeds: Sequence[Any], prompt: str
) -> dict[str, Any]:
    """Return the outputs of the U-Net and of `layers` over the runs, joined, and the image of `prompt`."""
    run, joined = run_graph(folder / "unet" / pipeline_folder.MODEL, model, layers, feeds)
    pipeline.models["unet"] = run
    joined["image"] = np.asarray(
        pipeline(
            prompt, num_inference_steps=LAYER_STEPS, guidance_scale=demo.GUIDANCE, generator=0, progress=False
        ).images[0]
    )
    return joined


def worst_table(work: Path, runs: Path, numbers: Sequence[int]) -> list[str]:
    """Return the lines of two tables on the int8 images of unseen prompts, image i from seed i."""
    model = layer_graph(work / "float32" / "unet" / pipeline_folder.MODEL)
    groups, singles = layer_groups(model)
    feeds = load_recorded_inputs(runs, "unet", list(model.graph.inputs), required=True)
    names = list(dict.fromkeys(str(layer.x.name) for layer in groups["all that are quantized"]))
    percentile = PERCENTILES["int8"]
    clipped, ranges = (
        cached_ranges(work / f"ranges-int8{name}.json", model, names, feeds, "int8", clip_gates=clip)
        for name, clip in (("-clipped", True), ("", False))
    )
    folder = layer_folder(work, "int8")
    pipeline = StableDiffusionPipeline.from_pretrained(folder, "cpu", threads=1)
    prompts = unseen_prompts(max(numbers) + 1, 0)

    def draw(seeds: Sequence[int]) -> list[np.ndarray]:
        result = pipeline(
            [prompts[seed] for seed in seeds], height=demo.HEIGHT, width=demo.WIDTH, num_inference_steps=demo.STEPS,
            guidance_scale=demo.GUIDANCE, generator=list(seeds), progress=False,
        )  # fmt: skip
        return [np.asarray(image) for image in result.images]

    expected = dict(zip(numbers, draw(numbers), strict=True))

    def values(seeds: Sequence[int], ranges: dict[str, float], float32: Sequence[str] = ()) -> list[float]:
        layers = [layer for name, each in singles.items() if name not in float32 for layer in each]
        copy, _ = quantized_copy(model, layers, "int8", ranges)
        pipeline.models["unet"] = run_graph(folder / "unet" / pipeline_folder.MODEL, copy, [], feeds[:1])[0]
        generated = draw(seeds)
        return [metrics.psnr(image, expected[seed]) for seed, image in zip(seeds, generated, strict=True)]

    alone: list[tuple[str, float]] = []
    within = list(singles)
    for pattern in (BLOCK, KIND, ANY):  # blocks, then kinds of layers in the one that does it, then layers
        parts: dict[str, list[str]] = {}
        for name in within:
            part = pattern.search(name)
            parts.setdefault(part.group() if part else name, []).append(name)
        effect = {part: values(numbers[:1], clipped, each)[0] for part, each in parts.items()}
        best = max(effect, key=effect.__getitem__)
        alone += [(f"{part} ({len(each)} layers)", effect[part]) for part, each in parts.items()]
        within = parts[best]
        print(best, effect, flush=True)
    rows = {
        "all, every range clipped": values(numbers, clipped),
        "**all, gates' ranges not clipped, as `optimize` does**": values(numbers, ranges),
        f"every range clipped, {within[0]} in float32": values(numbers, clipped, within),
    }
    lines = [
        "# The worst images of the demo's U-Net in int8", "",
        f"PSNR beside float32, in dB, of unseen prompts by number (which is the seed), {demo.STEPS} steps. Ranges are "
        f"calibrated on {CALIBRATION_PROMPTS} prompts; clipped: at percentile {percentile:g} of the magnitudes.", "",
    ]  # fmt: skip
    cells = ((label, *(f"{value:.1f}" for value in each), f"{median(each):.1f}") for label, each in rows.items())
    lines += table(("layers in int8", *(f"#{number}" for number in numbers), "median"), cells)
    lines += ["", f"## #{numbers[0]} with a group of layers in float32", "",
              f"`{prompts[numbers[0]]}`, every range clipped.", ""]  # fmt: skip
    return lines + table(("in float32", "PSNR, dB"), ((label, f"{value:.1f}") for label, value in alone))


def page(result: dict[str, Any]) -> str:
    lines = [
        "# The demo's U-Net in 8 bits",
        "",
        f"Written by `{result['command']}` at {result['commit']} on {result['machine']['cpu']}.",
        f"Calibrated on {CALIBRATION_PROMPTS} prompts; percentiles of magnitudes: "
        + ", ".join(f"{name} {percentile:g}" for name, percentile in PERCENTILES.items())
        + ". `float8` and `int8`: linears and convolutions with QDQ, a scale a channel; `float8 operators`: linears by",
        "the definition of QuantizedLinear, as GPU targets run them, with one scale a weight; `int8 operators`: the",
        "CPU's kernels for linears and convolutions, a scale a channel.",
        "",
    ]
    rows = (
        (row["label"], f"{row['right']} of {row['total']}",
         *(f"{row[key]:.1f}" if key in row else "" for key in ("median_db", "tenth_db", "min_db")))
        for row in result["rows"]
    )  # fmt: skip
    lines += table(("U-Net", "right", "median PSNR, dB", "tenth percentile", "worst"), rows)
    for format_, rows in result["layers"].items():
        groups = [row for row in rows if row["error"] is None or row["name"].startswith("not quantized")]
        layers = sorted((row for row in rows if row not in groups), key=lambda row: -row["unet_error"])
        lines += [
            "",
            f"## {format_}: what a layer or a group alone does",
            "",
            f"Relative error of the layer's output and of the U-Net's over {LAYER_RUNS} recorded runs, and PSNR of an "
            f"image of {LAYER_STEPS} steps, beside float32."
            + (f" Single layers: the 40 of {len(layers)} with the largest effect on the U-Net." if layers else ""),
            "",
        ]
        cells = (
            (row["name"], row["op"], "" if row["error"] is None else f"{row['error']:.2e}", f"{row['unet_error']:.2e}",
             f"{min(row['psnr_db'], 99.9):.1f}")
            for row in [*groups, *layers[:40]]
        )  # fmt: skip
        lines += table(("layer", "operator", "error", "U-Net's error", "PSNR, dB"), cells)
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=200, help="unseen prompts (200)")
    parser.add_argument("--engines", nargs="*", choices=ENGINES, default=list(ENGINES), help="U-Nets in 8 bits")
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=list(FORMATS), help="formats of the layers")
    parser.add_argument("--layers", type=int, help="number of single layers (all); 0: groups alone")
    parser.add_argument("--worst", type=int, nargs="+", metavar="N", help="numbers of unseen prompts, the worst first")
    parser.add_argument("--recipes", action="store_true", help="each layer alone, beside the published recipes")
    parser.add_argument("--work", type=Path, default=Path("out/eight_bits"), help="folder of the pipelines")
    parser.add_argument("--out", type=Path, default=Path("results/eight_bits.md"), help="the result")
    options = parser.parse_args()
    about = head("scripts/bench/eight_bits.py")
    options.work.mkdir(parents=True, exist_ok=True)
    reference, runs = options.work / "float32", options.work / "runs.npz"
    if not runs.is_file():
        optimize("demo", reference, target="portable", on_progress=print)
        record_runs(reference, training_prompts(CALIBRATION_PROMPTS), runs)
    if options.worst:
        lines = worst_table(options.work, runs, options.worst)
        lines += ["", f"`{about['command']}` at {about['commit']}, {about['machine']['cpu']}", ""]
        files.write_text(options.out, "\n".join(lines))
        return
    if options.recipes:
        all_layers = all_unet_layers(options.work)
        lines = recipes_head(all_layers, options.prompts)
        for format_ in options.formats:
            lines += recipe_table(options.work, runs, format_, all_layers, options.prompts)
        lines += ["", f"`{about['command']}` at {about['commit']}, {about['machine']['cpu']}", ""]
        files.write_text(options.out, "\n".join(lines))
        return
    prompts = unseen_prompts(options.prompts, 0)
    result: dict[str, Any] = about | {"rows": [], "layers": {}}

    def write() -> None:
        files.write_bytes(options.out, page(result).encode())

    started = time.perf_counter()
    expected = images(reference, prompts, options.work / f"float32-{len(prompts)}.npy")
    result["rows"].append(fidelity_row("float32", prompts, expected, None))
    for label in options.engines:
        target, format_ = ENGINES[label]
        folder = options.work / label.replace(" ", "-")
        cache = options.work / f"{folder.name}-{len(prompts)}.npy"
        if not cache.is_file():
            optimize("demo", folder, target=target, eight_bits=format_, inputs=runs, on_progress=print)
        generated = images(folder, prompts, cache)
        result["rows"].append(fidelity_row(label, prompts, generated, expected))
        print(result["rows"][-1], f"{time.perf_counter() - started:.0f} s", flush=True)
        write()
    for format_ in options.formats:
        result["layers"][format_] = layer_table(options.work, runs, format_, options.layers, LAYER_PROMPT)
        write()


if __name__ == "__main__":
    main()
