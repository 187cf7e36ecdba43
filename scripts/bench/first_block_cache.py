#!/usr/bin/env python3
"""FirstBlockCache on a FLUX transformer of full size with random weights: images as called, beside diffusers' hook.

    python scripts/bench/first_block_cache.py flux-dev --out results/first_block_cache_h200.json
    python scripts/bench/first_block_cache.py flux-dev --blocks 4 8 --no-peer    # fewer blocks: a quick look

Our provider in bfloat16 from a prompt to a PIL image, for each threshold the full steps and the seconds; diffusers runs
eager with cuDNN's attention and its own hook. What random weights change from step to step says nothing of a trained
model's full steps: the two parts are timed by a fit of the seconds over the full steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import sd_ort
from scripts.bench import bench_transformer_image as whole
from scripts.bench.bench_gpu_step import VENDOR
from scripts.bench.gpu_models import DEVICE
from scripts.report import head
from sd_ort.checkpoints import presets
from sd_ort.core import files
from sd_ort.runtime.library import PROVIDER_LIBRARIES, library_path
from sd_ort.stages import optimize

PRESET = "first-block-cache"  # the preset with fewer blocks


def with_blocks(preset: str, double: int, single: int) -> str:
    """Return the name of a preset with fewer blocks, which is added to the presets."""
    models = dict(presets.PRESETS[preset].models)
    models["transformer"] = {**models["transformer"], "num_layers": double, "num_single_layers": single}
    presets.PRESETS[PRESET] = dataclasses.replace(presets.PRESETS[preset], models=models)
    return PRESET


def timed(pipeline: Any, rounds: int, **arguments: Any) -> float:
    """Return the median seconds of a call after a first one. All have the same noise."""

    def call() -> None:
        pipeline(**arguments, generator=torch.Generator().manual_seed(1))

    call()
    return median(whole.seconds(call) for _ in range(rounds))


def ours(pipeline: Any, threshold: float | None, rounds: int, **arguments: Any) -> dict[str, Any]:
    """Return full steps and seconds of our pipeline at a threshold; without the cache for None."""
    pipeline.disable_cache()
    if threshold is not None:
        pipeline.enable_cache(threshold=threshold)
    seconds = timed(pipeline, rounds, **arguments)
    steps = arguments["num_inference_steps"] if threshold is None else pipeline._cached.full_steps
    return {"threshold": threshold, "full_steps": steps, "seconds": seconds}


def theirs(pipeline: Any, threshold: float | None, rounds: int, **arguments: Any) -> dict[str, Any]:
    """Return full steps and seconds of diffusers' pipeline, as `ours`."""
    from diffusers.hooks import FirstBlockCacheConfig

    runs: list[int] = []
    transformer = pipeline.transformer
    last = transformer.single_transformer_blocks[-1].proj_out.register_forward_hook(lambda *_: runs.append(1))
    if threshold is not None:
        transformer.enable_cache(FirstBlockCacheConfig(threshold=threshold))
    try:
        seconds = timed(pipeline, rounds, **arguments)
    finally:
        last.remove()
        if threshold is not None:
            transformer.disable_cache()
    return {"threshold": threshold, "full_steps": len(runs) / (rounds + 1), "seconds": seconds}


def fit(rows: list[dict[str, Any]], steps: int) -> dict[str, float]:
    """Return the seconds of the first block and of the later blocks in a step, by least squares over the rows.

    The first one has the rest of the call in it, such as text encoders and the VAE.
    """
    cached = [row for row in rows if row["threshold"] is not None]
    full = [row["full_steps"] for row in cached]
    if len(set(full)) < 2:
        return {}
    later, rest = np.polyfit(full, [row["seconds"] for row in cached], 1)
    return {"later_blocks_s": float(later), "first_block_and_rest_s": float(rest / steps)}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", choices=[name for name in presets.PRESETS if name.startswith("flux-")])
    parser.add_argument("--blocks", type=int, nargs=2, metavar=("DOUBLE", "SINGLE"), help="fewer blocks than its own")
    parser.add_argument("--thresholds", type=float, nargs="+", default=[1e-9, 0.05, 0.1, 0.2, 0.4, 0.999])
    parser.add_argument("--pixels", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--no-peer", action="store_true", help="leave out diffusers' hook")
    parser.add_argument("--provider", help="a provider instead of the built library")
    parser.add_argument("--raw", type=Path, default=Path("/dev/shm/sd_ort_fbc_raw"), help="folder for diffusers' files")
    parser.add_argument("--work", type=Path, default=Path("/dev/shm/sd_ort_fbc"), help="folder for ours")
    parser.add_argument("--out", type=Path, default=Path("results/first_block_cache_h200.json"))
    options = parser.parse_args()
    begun = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - begun:6.1f} s] {text}", flush=True)

    library = library_path(PROVIDER_LIBRARIES[VENDOR])
    if library is None and options.provider is None:
        raise SystemExit("Build our provider first: sd-ort build-ops --cuda sm_90.")
    preset = with_blocks(options.preset, *options.blocks) if options.blocks else options.preset
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
        say("random weights saved")
        optimize(options.raw / "model", options.work / "ours", target="gpu", dtype=whole.DTYPE, hoist=True)
        shutil.rmtree(options.raw)
        provider = options.provider or f"plugin:{library}"
        pipeline = pipeline_class.from_pretrained(options.work / "ours", provider, tuning=DEVICE == "cuda")
        say("optimized and open")
        if options.no_peer:
            del peer
        pipeline.set_progress_bar_config(disable=True)
        runs = [("ours", ours, pipeline)]
        if not options.no_peer:
            if DEVICE == "cuda":
                peer.transformer.set_attention_backend("_native_cudnn")
            runs.append(("diffusers", theirs, peer))
        for label, run, model in runs:
            rows: list[dict[str, Any]] = []
            for threshold in (None, *options.thresholds):
                rows.append(run(model, threshold, options.rounds, **arguments))
                say(f"{label} {json.dumps(rows[-1])}")
                result[label] = {"rows": rows, **fit(rows, options.steps)}
                files.write_json(options.out, result)
            say(f"{label} {fit(rows, options.steps)}")
    finally:
        for folder in (options.raw, options.work):
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
