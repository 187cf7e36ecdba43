#!/usr/bin/env python3
"""Caches between the steps of a transformer of full width with random weights: images as called, beside diffusers.

    python scripts/bench/first_block_cache.py flux-dev
    python scripts/bench/first_block_cache.py flux-dev --blocks 4 8 --no-peer    # fewer blocks: a quick look
    python scripts/bench/first_block_cache.py qwen-image --steps 20
    python scripts/bench/first_block_cache.py flux-dev --thresholds 0.1 --skips 1 3 --lite 2 5    # and other caches

writes <out>/<preset>.json. Our provider in bfloat16 from a prompt to a PIL image, for each threshold the full steps and
the seconds; diffusers runs with cuDNN's attention, its blocks compiled (torch.compile) and its own hooks around them.
What random weights change from step to step says nothing of a trained model's full steps: the two parts are timed by a
fit of the seconds over the full steps. MagCache runs with ratios of 1, so that it skips as many steps in a row as it
may.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import shutil
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import sd_ort
from scripts.bench import bench_transformer_image as whole
from scripts.bench.gpu_models import DEVICE, elapsed_log, provider_library
from scripts.report import head
from sd_ort import FirstBlockCacheConfig, MagCacheConfig, TaylorSeerCacheConfig
from sd_ort.checkpoints import presets
from sd_ort.core import files
from sd_ort.stages import optimize

PRESET = "first-block-cache"  # the preset with fewer blocks


def with_blocks(preset: str, counts: list[int]) -> str:
    """Return the name of a preset with fewer blocks of each kind, which is added to the presets."""
    models = dict(presets.PRESETS[preset].models)
    kinds = [kind for kind in ("num_layers", "num_single_layers") if kind in models["transformer"]]
    if len(counts) != len(kinds):
        raise SystemExit(f"Give {preset} --blocks with {len(kinds)} numbers: {', '.join(kinds)}.")
    models["transformer"] = models["transformer"] | dict(zip(kinds, counts, strict=True))
    presets.PRESETS[PRESET] = dataclasses.replace(presets.PRESETS[preset], models=models)
    return PRESET


def timed(pipeline: Any, rounds: int, **arguments: Any) -> float:
    """Return the median seconds of a call after a first one. All have the same noise."""

    def call() -> None:
        pipeline(**arguments, generator=torch.Generator().manual_seed(1))

    call()
    return median(whole.seconds(call) for _ in range(rounds))


def caches(options: argparse.Namespace) -> list[Any]:
    """Return the settings of the caches to time, without one first."""
    ratios = [1.0] * options.steps
    first_block = [FirstBlockCacheConfig(threshold) for threshold in options.thresholds]
    mag = [MagCacheConfig(1e9, skips, 0.0, options.steps, ratios) for skips in options.skips]
    lite = [TaylorSeerCacheConfig(interval, use_lite_mode=True) for interval in options.lite]
    return [None, *first_block, *mag, *lite]


def settings_of(config: Any) -> dict[str, Any]:
    """Return the settings of a row's cache."""
    names = {
        FirstBlockCacheConfig: "threshold",
        MagCacheConfig: "max_skip_steps",
        TaylorSeerCacheConfig: "cache_interval",
    }
    if config is None:
        return {"cache": None}
    name = names[type(config)]
    return {"cache": type(config).__name__, name: getattr(config, name)}


def ours(pipeline: Any, config: Any, rounds: int, **arguments: Any) -> dict[str, Any]:
    """Return full steps and seconds of our pipeline with a cache; without one for None."""
    pipeline.disable_cache()
    if config is not None:
        pipeline.enable_cache(config)
    seconds = timed(pipeline, rounds, **arguments)
    steps = arguments["num_inference_steps"] if config is None else pipeline._cached.full_steps
    return {**settings_of(config), "full_steps": steps, "seconds": seconds}


def theirs(pipeline: Any, config: Any, rounds: int, **arguments: Any) -> dict[str, Any]:
    """Return the number of full steps and the seconds of diffusers' pipeline with a cache."""
    from diffusers import hooks

    runs: list[int] = []
    transformer = pipeline.transformer
    blocks = getattr(transformer, "single_transformer_blocks", transformer.transformer_blocks)
    compiled = blocks[-1].forward

    def count(*inputs: Any, **named_inputs: Any) -> Any:
        runs.append(1)
        return compiled(*inputs, **named_inputs)

    blocks[-1].forward = count  # a hook of a cache calls it in full steps only
    if config is not None:
        settings = vars(config) | ({"taylor_factors_dtype": torch.bfloat16} if hasattr(config, "use_lite_mode") else {})
        transformer.enable_cache(getattr(hooks, type(config).__name__)(**settings))
    try:
        seconds = timed(pipeline, rounds, **arguments)
    finally:
        if config is not None:
            transformer.disable_cache()
        blocks[-1].forward = compiled
    return {**settings_of(config), "full_steps": len(runs) / (rounds + 1), "seconds": seconds}


def compile_blocks(transformer: Any) -> None:
    """Compile the forward of each block, once for blocks of one class; the hooks of caches then run outside of it."""
    forwards: dict[type, Any] = {}
    for name in ("transformer_blocks", "single_transformer_blocks"):
        for block in getattr(transformer, name, ()):
            forward = forwards.setdefault(type(block), torch.compile(type(block).forward, fullgraph=True))
            block.forward = functools.partial(forward, block)


def fit(rows: list[dict[str, Any]], steps: int) -> dict[str, float]:
    """Return the seconds of the first block and of the later blocks in a step, by least squares over the rows.

    The first one has the rest of the call in it, such as text encoders and the VAE.
    """
    cached = [row for row in rows if row["cache"] == FirstBlockCacheConfig.__name__]
    full = [row["full_steps"] for row in cached]
    if len(set(full)) < 2:
        return {}
    later, rest = np.polyfit(full, [row["seconds"] for row in cached], 1)
    return {"later_blocks_s": float(later), "first_block_and_rest_s": float(rest / steps)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "preset", choices=[name for name in presets.PRESETS if name.startswith(("flux-", "qwen-image"))]
    )
    parser.add_argument("--blocks", type=int, nargs="+", metavar="N", help="fewer blocks, a number for each kind")
    parser.add_argument("--thresholds", type=float, nargs="*", default=[1e-9, 0.05, 0.1, 0.2, 0.4, 0.999])
    parser.add_argument("--skips", type=int, nargs="*", default=[], help="MagCache's max_skip_steps")
    parser.add_argument("--lite", type=int, nargs="*", default=[], help="cache_interval of TaylorSeer's lite mode")
    parser.add_argument("--pixels", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--no-peer", action="store_true", help="leave out diffusers' hook")
    parser.add_argument("--provider", help="a provider instead of the built library")
    parser.add_argument("--raw", type=Path, default=Path("/dev/shm/sd_ort_fbc_raw"), help="folder for diffusers' files")
    parser.add_argument("--work", type=Path, default=Path("/dev/shm/sd_ort_fbc"), help="folder for ours")
    parser.add_argument("--out", type=Path, default=Path("results/transformers/caches"))
    options = parser.parse_args()
    log = elapsed_log()
    provider = options.provider or f"plugin:{provider_library()}"
    preset = with_blocks(options.preset, options.blocks) if options.blocks else options.preset
    pipeline_class = getattr(sd_ort, presets.PRESETS[preset].pipeline)
    settings = {"preset": options.preset, "blocks": options.blocks, "pixels": options.pixels, "steps": options.steps}
    result: dict[str, Any] = head("scripts/bench/first_block_cache.py") | settings
    arguments = {
        "prompt": whole.PROMPT, "height": options.pixels, "width": options.pixels, "num_inference_steps": options.steps,
    }  # fmt: skip
    try:
        for folder in (options.raw, options.work):
            folder.mkdir(parents=True)
        with torch.inference_mode():
            peer = whole.torch_pipeline(preset, options.raw / "model")
        log("random weights saved")
        optimize(options.raw / "model", options.work / "ours", target="gpu", dtype=whole.DTYPE, hoist=True)
        shutil.rmtree(options.raw)
        pipeline = pipeline_class.from_pretrained(options.work / "ours", provider, tuning=DEVICE == "cuda")
        log("optimized and open")
        if options.no_peer:
            del peer
        pipeline.set_progress_bar_config(disable=True)
        runs = [("ours", ours, pipeline)]
        if not options.no_peer:
            result["peer"] = "torch.compile of the repeated blocks"
            if DEVICE == "cuda":
                peer.transformer.set_attention_backend("_native_cudnn")
            compile_blocks(peer.transformer)
            runs.append(("diffusers", theirs, peer))
        for label, run, model in runs:
            rows: list[dict[str, Any]] = []
            for config in caches(options):
                rows.append(run(model, config, options.rounds, **arguments))
                log(f"{label} {json.dumps(rows[-1])}")
                result[label] = {"rows": rows, **fit(rows, options.steps)}
                files.write_json(options.out / f"{options.preset}.json", result)
            log(f"{label} {fit(rows, options.steps)}")
    finally:
        for folder in (options.raw, options.work):
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
