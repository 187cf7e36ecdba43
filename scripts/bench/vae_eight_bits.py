"""The demo's VAE decoder in 8 bits: images, and each layer's error. Writes results/vae_eight_bits.md.

    python scripts/bench/vae_eight_bits.py                 # float8 and int8; about 30 minutes on one thread
    python scripts/bench/vae_eight_bits.py --images-only --out results/vae_eight_bits_sizes.md

Decodes the same latents of unseen prompts with the decoder in float32 and in 8 bits (`optimize --vae-decoder`), at the
demo's size and up to 2048x2048, after a calibration on 64 prompts of the training's combinations. `portable` folders
run QuantizeLinear and DequantizeLinear around layers that compute in float32, so the images are those of 8-bit kernels
up to the rounding of sums, and the time is not theirs. `cpu` folders run the CPU's kernels, which for int8 compute in
8 bits.

The table of layers quantizes one layer, or all but the layers with the largest effect. Its errors are relative (L2).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx_ir as ir

from fusion_passes.eight_bits.layers import CONVOLUTIONS, LINEARS, Layer, channel_axis, find_layers
from fusion_passes.quantized_weights import FORMATS
from scripts.bench.eight_bits import (
    CALIBRATION_PROMPTS,
    cached_ranges,
    layer_folder,
    layer_graph,
    module_name,
    quantized_copy,
    run_graph,
)
from scripts.report import head, table
from sd_ort import StableDiffusionPipeline, demo
from sd_ort.checkpoints.conditioning import latent_scale
from sd_ort.checkpoints.recorded_inputs import load_recorded_inputs
from sd_ort.core import files, metrics, pipeline_folder
from sd_ort.demo.fidelity import score, unseen_prompts
from sd_ort.demo.scenes import training_prompts
from sd_ort.optimize.eight_bits import VAE_DECODER
from sd_ort.pipelines.calibration_runs import record_runs
from sd_ort.runtime.session import SessionOptions
from sd_ort.runtime.session import load as open_component
from sd_ort.stages import optimize

SIZES = {demo.WIDTH: 40, 512: 1, 1024: 1, 2048: 1}  # edges of images, and how many
STEPS = {demo.WIDTH: demo.STEPS, 512: 8, 1024: 4}  # denoising steps
MIRRORED = {2048: 1024}  # edges of images whose latents are those of a smaller one and its mirror images
FIRST = 8  # layers of int8 with the largest effect, which are measured in float8 as well
FLOAT16_COUNTS = (1, 2, 4, 8)  # layers with the largest effect that stay in 16 bits
LAYER_EDGE = 512  # of the image for a layer
ENGINES = {
    "float32": ("portable", None),
    "int8": ("portable", "int8"),
    "float8": ("portable", "float8"),
    "float32, target cpu": ("cpu", None),
    "int8, target cpu": ("cpu", "int8"),
}
# Dense peaks of the data sheets in 16 bits, of which 8 bits have twice, FLOP/s, and bytes/s.


def decoder_inputs(folder: Path, prompts: Sequence[str], edge: int, cache: Path) -> np.ndarray:
    """Return the decoder's inputs (N, 4, h, w) for prompts, image i from seed i; those of earlier runs from `cache`."""
    if cache.is_file():
        return np.load(cache)[: len(prompts)]
    if edge in MIRRORED:
        smaller = decoder_inputs(folder, prompts, MIRRORED[edge], cache.with_name(f"latents-{MIRRORED[edge]}.npy"))
        return np.pad(smaller, ((0, 0), (0, 0), (0, smaller.shape[2]), (0, smaller.shape[3])), mode="symmetric")
    pipeline = StableDiffusionPipeline.from_pretrained(folder, "cpu", threads=1)
    latents = [
        np.asarray(pipeline(prompt, generator=seed, num_inference_steps=STEPS[edge], guidance_scale=demo.GUIDANCE,
                            height=edge, width=edge, output_type="latent", progress=False).images)
        for seed, prompt in enumerate(prompts)
    ]  # fmt: skip
    mean, factor = latent_scale(pipeline.vae.config)
    np.save(cache, np.concatenate(latents) * factor + mean)
    return np.load(cache)


def run_decoder(folder: Path, latents: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the decoder's output (N, 3, H, W) for latents, and the processor's seconds an image."""
    decoder = open_component(folder, VAE_DECODER, options=SessionOptions(threads=1))
    decoder(latent_sample=latents[:1, :, :16, :16])
    started = time.process_time()
    images = np.concatenate([next(iter(decoder(latent_sample=each[None]).values())) for each in latents])
    return images, (time.process_time() - started) / len(latents)


def as_bytes(images: np.ndarray) -> np.ndarray:
    """Return images (N, H, W, 3), uint8, of a decoder's output."""
    return np.round(255 * np.clip(images / 2 + 0.5, 0, 1)).astype(np.uint8).transpose(0, 2, 3, 1)


def image_rows(work: Path, edge: int, latents: np.ndarray, engines: Sequence[str]) -> list[tuple[str, ...]]:
    """Return a row for each engine at the size `edge`."""
    prompts = unseen_prompts(len(latents), 0)
    rows = []
    expected: np.ndarray | None = None
    for name in engines:
        folder = work / name.replace(", target ", "-")
        output, seconds = run_decoder(folder, latents)
        images = as_bytes(output)
        expected = images if expected is None else expected
        right = f"{score(prompts, images).correct} of {len(prompts)}" if edge == demo.WIDTH else ""
        values = [metrics.psnr(ours, theirs) for ours, theirs in zip(images, expected, strict=True)]
        quality = ["", ""]
        if name != "float32":
            quality = [f"{min(value, 99.9):.1f}" for value in (median(values), min(values))]
        size = (folder / VAE_DECODER / pipeline_folder.DATA).stat().st_size / 1e6
        rows.append((f"{edge}²", name, right, *quality, f"{seconds:.3g}", f"{size:.2f} MB"))
        print(rows[-1], flush=True)
    return rows


def layer_rows(
    work: Path, latents: np.ndarray, format_: str, order: Sequence[str]
) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return rows of each layer, then of all but those with the largest effect, and the layers by their effect.

    order: that of another format, of which the first and those that stay in 16 bits are measured alone; all if empty.
    """
    model = layer_graph(work / "float32" / VAE_DECODER / pipeline_folder.MODEL)
    layers, reasons = all_layers(model)
    names = list(dict.fromkeys(str(layer.x.name) for layer in layers.values()))
    feeds = load_recorded_inputs(work / "runs.npz", VAE_DECODER, list(model.graph.inputs), required=True)
    ranges = cached_ranges(work / f"ranges-{format_}.json", model, names, feeds, format_)
    path = layer_folder(work, format_) / VAE_DECODER / pipeline_folder.MODEL
    feeds = [{"latent_sample": each[None]} for each in latents]

    def run(model: ir.Model, layers: Sequence[Layer]) -> dict[str, Any]:
        outputs = run_graph(path, model, layers, feeds)[1]
        image = outputs["sample"].reshape(len(feeds), 3, -1, 1)
        return {**outputs, "sample": as_bytes(image)}

    def quantized(selected: Sequence[Layer], outputs: bool = False) -> dict[str, Any]:
        copy, copies = quantized_copy(model, selected, format_, ranges)
        return run(copy, copies if outputs else [])

    expected = run(model, list(layers.values()))
    alone: dict[str, tuple[float | None, float]] = {}
    for name in [name for name in layers if not order or name in order[:FIRST] or name in reasons]:
        layer = layers[name]
        actual, output = quantized([layer], outputs=True), str(layer.node.outputs[0].name)
        error = metrics.relative_l2_error(actual[output], expected[output]) if output != "sample" else None
        alone[name] = error, metrics.psnr(actual["sample"], expected["sample"])
        print(name, alone[name], flush=True)
    measured = sorted(alone, key=lambda name: alone[name][1])
    order = order or measured
    rows: list[tuple[str, ...]] = [
        (name, " x ".join(str(size) for size in layers[name].weight.shape or ()), reasons.get(name, ""),
         "" if alone[name][0] is None else f"{alone[name][0]:.2e}", f"{min(alone[name][1], 99.9):.1f}")
        for name in measured
    ]  # fmt: skip
    chosen = {"all layers": order, "**all that are quantized**": [name for name in order if name not in reasons]}
    chosen |= {
        f"all but the first {count}" if count > 1 else "all but the first": order[count:] for count in FLOAT16_COUNTS
    }
    for label, selected in chosen.items():
        actual = quantized([layers[name] for name in layers if name in selected])
        rows.append((label, "", "", "", f"{metrics.psnr(actual['sample'], expected['sample']):.1f}"))
        print(rows[-1], flush=True)
    return rows, list(order)


def all_layers(model: ir.Model) -> tuple[dict[str, Layer], dict[str, str]]:
    """Return all layers with constant weights by module, and why some of them stay in 16 bits."""
    quantizable = find_layers(model.graph, CONVOLUTIONS | LINEARS)
    reasons = {rejection.node: rejection.reason for rejection in quantizable.rejections}
    layers = {
        module_name(node): Layer(node, channel_axis(node))
        for node in model.graph
        if node.op_type in CONVOLUTIONS | LINEARS and node.inputs[1] is not None and node.inputs[1].is_initializer()
    }
    return layers, {name: reasons[layer.node] for name, layer in layers.items() if layer.node in reasons}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=["int8", "float8"], help="formats (both)")
    parser.add_argument("--edges", nargs="*", type=int, choices=SIZES, default=list(SIZES), help="sizes (all)")
    parser.add_argument("--images-only", action="store_true", help="no tables of layers")
    parser.add_argument("--work", type=Path, default=Path("out/vae_eight_bits"), help="folder for the pipelines")
    parser.add_argument("--out", type=Path, default=Path("results/vae_eight_bits.md"), help="the result")
    options = parser.parse_args()
    work = options.work
    runs = work / "runs.npz"
    if not runs.is_file():
        optimize("demo", work / "float32", target="portable", on_progress=print)
        record_runs(work / "float32", training_prompts(CALIBRATION_PROMPTS), runs, vae_decoder=True)
    engines = [name for name, (_, format_) in ENGINES.items() if format_ in (None, *options.formats)]
    for name in engines:
        target, eight_bits = ENGINES[name]
        folder = work / name.replace(", target ", "-")
        if not folder.is_dir():
            ranges = {"eight_bits": eight_bits, "vae_decoder": True, "inputs": runs} if eight_bits else {}
            optimize("demo", folder, target=target, components=[VAE_DECODER], on_progress=print, **ranges)
    columns = "image", "decoder", "right", "median PSNR, dB", "worst", "processor s an image", "weights on disk"
    latents: dict[int, np.ndarray] = {}
    image_lines: list[tuple[str, ...]] = []
    lines: list[str] = []
    for edge in options.edges:
        prompts = unseen_prompts(SIZES[edge], 0)
        latents[edge] = decoder_inputs(work / "float32", prompts, edge, work / f"latents-{edge}.npy")
        image_lines += image_rows(work, edge, latents[edge], engines)
        lines = table(columns, image_lines)
        files.write_text(options.out, page(lines, latents))
    order: list[str] = []
    for format_ in [] if options.images_only else options.formats:
        lines += ["", f"## {format_}: what a layer alone does to an image of {LAYER_EDGE}²", ""]
        prompts = unseen_prompts(SIZES[LAYER_EDGE], 0)
        inputs = decoder_inputs(work / "float32", prompts, LAYER_EDGE, work / f"latents-{LAYER_EDGE}.npy")
        rows, order = layer_rows(work, inputs, format_, order)
        names = "layer", "weight", "stays in 16 bits, since", "its relative error", "PSNR, dB"
        lines += table(names, rows)
        files.write_text(options.out, page(lines, latents))


def page(tables: Sequence[str], latents: Mapping[int, np.ndarray]) -> str:
    """Return the Markdown page. latents: of the measured images by size."""
    run = head("scripts/bench/vae_eight_bits.py")
    counts = ", ".join(f"{len(each)} of {edge}²" for edge, each in latents.items())
    mirrored = "".join(
        f"; one of {edge}² is an image of {smaller}² and its mirror images"
        for edge, smaller in MIRRORED.items()
        if edge in latents
    )
    lines = [
        "# The demo's VAE decoder in 8 bits", "",
        "`optimize --float8|--int8 --vae-decoder`, of target portable unless named: weights a scale an output channel, "
        f"activations a scale a tensor, calibrated on {CALIBRATION_PROMPTS} prompts. PSNR beside the decoder in "
        f"float32, over images of unseen prompts: {counts}{mirrored}. "
        "QuantizeLinear and DequantizeLinear compute in float32 on a CPU, so their time is not that of 8-bit kernels; "
        "target cpu has such kernels for int8. Times are of one thread of a shared machine.", "",
        *tables, "",
        f"`{run['command']}` at {run['commit']}, {run['machine']['cpu']}", "",
    ]  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    main()
